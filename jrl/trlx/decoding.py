# SPDX-License-Identifier: Apache-2.0
"""Texts of sampled ids: prompts, what was written behind them, and both together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jrl.data.prompts import SEPARATOR
from jrl.rollout.text import decode_rows
from jrl.trainers.policy_trainer import PolicyTrainer


def decode_samples(
    trainer: PolicyTrainer,
    prompts: Iterable[Any],
    samples: Iterable[Any],
    prompt_sizes: Sequence[int] | None,
    *,
    stop_sequences: Sequence[str],
    append_eos_token: bool,
) -> tuple[list[str], list[str], list[str]]:
    """Texts of what `generate_ids` returned: (samples, prompts, outputs).

    Args:
      trainer: Whose tokenizer decodes.
      prompts: Ids of each prompt.
      samples: Ids of each prompt with what follows it; of a seq2seq model, the decoder's row.
      prompt_sizes: Columns of each prompt; None: the width of the prompts.
      stop_sequences: Texts that end an output.
      append_eos_token: Whether EOS's text follows outputs that ended by themselves.
    """
    tokenizer, start = trainer.tokenizer, trainer.lm.decoder_start_token_id
    ends = trainer.settings.eos_token_id
    queries = [np.asarray(prompt).ravel().tolist() for prompt in prompts]
    sizes = (
        [len(query) for query in queries] if prompt_sizes is None else [int(size) for size in prompt_sizes]
    )
    queries = [query[:size] for query, size in zip(queries, sizes, strict=True)]
    rows = []
    for sample, size in zip(samples, sizes, strict=True):
        row = np.asarray(sample).ravel().tolist()
        if start is None:
            rows.append(row[size:])
        else:
            rows.append(row[1:] if row and row[0] == start else row)
    pad = tokenizer.pad_token_id
    lengths = [_length(row, ends, pad) for row in rows]
    width = max(map(len, rows), default=0)
    tokens = np.array([row + [pad] * (width - len(row)) for row in rows], np.int32).reshape(len(rows), width)
    texts = decode_rows(
        tokenizer,
        queries,
        tokens,
        np.asarray(lengths, np.int32),
        eos_token_ids=ends,
        stop_sequences=stop_sequences,
        separator=None if start is None else tokenizer.sep_token or SEPARATOR,
    )
    if not append_eos_token:
        return texts.samples, texts.prompts, texts.outputs
    ended = [
        stopped or (bool(row) and row[-1] in (*ends, pad))
        for row, stopped in zip(rows, texts.stopped, strict=True)
    ]
    tails = [tokenizer.eos_token if flag else "" for flag in ended]
    joined = [
        [text + tail for text, tail in zip(column, tails, strict=True)]
        for column in (texts.samples, texts.outputs)
    ]
    return joined[0], texts.prompts, joined[1]


def _length(row: Sequence[int], eos_token_ids: Sequence[int], pad_token_id: int) -> int:
    """Ids up to the first EOS, or, where there is none, without the padding behind them."""
    for place, token in enumerate(row):
        if token in eos_token_ids:
            return place + 1
    length = len(row)
    while length and row[length - 1] == pad_token_id:
        length -= 1
    return length
