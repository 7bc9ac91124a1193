# SPDX-License-Identifier: Apache-2.0
"""Predictions for transformers' `compute_metrics` of a language model: logits of all rows, and learned labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from transformers.trainer_utils import EvalPrediction

from jrl.data.batching import bucket_length, pad_right
from jrl.data.demonstrations import IGNORED_LABEL, DialogueRow, PackedSet, RowSet
from jrl.interop import TrainedModel


def predict_tokens(
    model: TrainedModel,
    samples: RowSet,
    *,
    batch_size: int,
    pad_token_id: int,
    preprocess: Callable[[Any, Any], Any] | None,
) -> EvalPrediction:
    """Logits (N T V) and labels (N T), or what `preprocess` takes of them; of a seq2seq model those of its decoder.

    The samples of packed rows come one by one: in one row they would read each other.

    Args:
      model: Answers to ids and a mask.
      samples: N of them.
      batch_size: Rows of a forward pass.
      pad_token_id: Fills the columns behind each row.
      preprocess: `(logits, labels) -> predictions` of a batch; None: the logits.
    """
    rows = samples.apart() if isinstance(samples, PackedSet) else samples.rows
    predictions, labels = [], []
    for start in range(0, len(rows), batch_size):
        some = rows[start : start + batch_size]
        # Few shapes, each of which is a program: copies fill the last batch up.
        filled = some + some[:1] * (batch_size - len(some))
        longest = max(len(row.tokens) for row in some)
        width = min(bucket_length(longest), samples.max_length)
        tokens, mask, label = labelled(filled, pad_token_id=pad_token_id, width=width)
        label = label[: len(some), :longest]
        if samples.contexts is None:
            output = model(tokens, mask)
        else:
            read = samples.contexts[start : start + batch_size]
            read = read + read[:1] * (batch_size - len(read))
            width = min(bucket_length(max(map(len, read))), samples.max_length)
            context = pad_right(read, pad_token_id=pad_token_id, width=width)
            output = model(*context, decoder_input_ids=tokens, decoder_attention_mask=mask)
        found = output.logits[: len(some), :longest]
        predictions.append(np.asarray(found if preprocess is None else preprocess(found, label)))
        labels.append(label)
    return EvalPrediction(_joined(predictions), _joined(labels))


def labelled(
    rows: Sequence[DialogueRow], *, pad_token_id: int, width: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, mask and labels (B L), −100 where nothing is learned.

    Args:
      rows: Samples.
      pad_token_id: Fills the columns behind each row.
      width: L; None: the longest row's.
    """
    tokens, mask = pad_right([row.tokens for row in rows], pad_token_id=pad_token_id, width=width)
    learned, _ = pad_right([row.learned for row in rows], pad_token_id=0, width=tokens.shape[1])
    return tokens, mask, np.where(learned.astype(bool), tokens, IGNORED_LABEL)


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    """Batches of different widths as one array, padded with −100 as transformers does."""
    if arrays[0].ndim < 2:
        return np.concatenate(arrays)
    width = max(array.shape[1] for array in arrays)
    padded = []
    for array in arrays:
        room = [(0, 0)] * array.ndim
        room[1] = (0, width - array.shape[1])
        padded.append(np.pad(array, room, constant_values=IGNORED_LABEL))
    return np.concatenate(padded)
