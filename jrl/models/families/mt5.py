# SPDX-License-Identifier: Apache-2.0
"""mT5 (Xue et al. 2021, arXiv:2010.11934): T5 1.1 on 101 languages, with a head of its own that nothing scales.

A file without a head has the embedding in its place, as transformers 5 writes it.
"""

from __future__ import annotations

from typing import Any

from jrl.models.families.base import Family
from jrl.models.families.t5 import IGNORED, entries, read_t5
from jrl.models.seq2seq_config import Seq2SeqConfig


def read_config(hf: Any) -> Seq2SeqConfig:
    """Maps an `MT5Config`."""
    return read_t5(hf, ties_head=False, scales_head=False)


FAMILY = Family(
    model_type="mt5",
    architecture="MT5ForConditionalGeneration",
    read_config=read_config,
    entries=entries,
    base_prefix="",
    ignored=IGNORED,
    kind="seq2seq",
)
