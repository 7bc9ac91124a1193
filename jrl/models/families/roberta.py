# SPDX-License-Identifier: Apache-2.0
"""RoBERTa (Liu et al. 2019, arXiv:1907.11692) as a classifier: BERT with positions that begin after the pad id."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jrl.models.encoder import EncoderConfig
from jrl.models.families.base import Entry, Family
from jrl.models.families.bert import body_entries, read_body, read_head_dropout
from jrl.models.families.tables import linear_entries


def read_config(hf: Any) -> EncoderConfig:
    """Maps a `RobertaConfig`.

    Raises:
      ValueError: If the config asks for a decoder or for relative positions.
    """
    body, offset = read_body(hf), hf.pad_token_id + 1
    return EncoderConfig(
        body=replace(body, max_positions=body.max_positions - offset, position_offset=offset),
        num_token_types=hf.type_vocab_size,
        pooler="tanh",
        num_labels=hf.num_labels,
        head_dropout=read_head_dropout(hf),
    )


def entries(config: EncoderConfig) -> list[Entry]:
    """Every tensor of a RoBERTa classifier."""
    width = config.body.width
    return [
        *body_entries(config, "roberta"),
        *linear_entries("classifier.dense", ("pooler",), width, width, bias=True),
        *linear_entries("classifier.out_proj", ("classifier",), width, config.num_labels, bias=True),
    ]


FAMILY = Family(
    model_type="roberta",
    architecture="RobertaForSequenceClassification",
    read_config=read_config,
    entries=entries,
    base_prefix="roberta.",
    # Old files hold BERT's pooler too, which this head does not read.
    ignored=(r"\.position_ids$", r"^roberta\.pooler\."),
    kind="encoder",
)
