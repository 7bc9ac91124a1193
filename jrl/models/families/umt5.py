# SPDX-License-Identifier: Apache-2.0
"""umT5 (Chung et al. 2023, arXiv:2304.09151): mT5 with a table of relative positions in every layer."""

from __future__ import annotations

from typing import Any

from jrl.models.families.base import Family
from jrl.models.families.t5 import IGNORED, entries, read_t5
from jrl.models.seq2seq_config import Seq2SeqConfig


def read_config(hf: Any) -> Seq2SeqConfig:
    """Maps a `UMT5Config`."""
    ties, scales = hf.tie_word_embeddings, hf.scale_decoder_outputs
    return read_t5(hf, ties_head=ties, scales_head=scales, bias_in_every_layer=True)


FAMILY = Family(
    model_type="umt5",
    architecture="UMT5ForConditionalGeneration",
    read_config=read_config,
    entries=entries,
    base_prefix="",
    ignored=IGNORED,
    kind="seq2seq",
)
