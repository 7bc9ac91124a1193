# SPDX-License-Identifier: Apache-2.0
"""Ragged queries, responses and scores of a script as the arrays that the learner reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl.data.batching import bucket_length, pad_left, pad_right
from jrl.trl.generation import as_row
from jrl.typing import ModelInputs, Sequences


class RolloutRows(NamedTuple):
    """Rows of one `step`, checked.

    Attributes:
      queries: Ids of each query.
      responses: Ids of each response; of an encoder-decoder without its start id.
      masks: False on response tokens that the policy did not choose, such as a tool's.
      rewards: Of each response token: a dense score as it was given, a scalar one on the last chosen token.
    """

    queries: list[list[int]]
    responses: list[list[int]]
    masks: list[np.ndarray]
    rewards: list[np.ndarray]


def read_rollouts(
    queries: Any,
    responses: Any,
    scores: Any,
    response_masks: Any,
    *,
    batch_size: int | None,
    decoder_start_token_id: int | None,
) -> RolloutRows:
    """Checks and normalises the arguments of `step`.

    Args:
      queries: List of 1-D arrays of ids.
      responses: The same.
      scores: One number a response, or a vector with one number a response token.
      response_masks: List of 0/1 arrays, one entry a response token; None: all were chosen.
      batch_size: How many of each there must be; None: any number.
      decoder_start_token_id: Of an encoder-decoder, whose responses may begin with it.
    Raises:
      ValueError: Naming the argument and the row.
    """
    given = {"queries": queries, "responses": responses, "scores": scores}
    given |= {} if response_masks is None else {"response_masks": response_masks}
    for name, column in given.items():
        if not isinstance(column, list | tuple):
            raise ValueError(f"`{name}` must be a list of arrays, got {type(column).__name__}.")
        wanted = len(queries) if batch_size is None else batch_size
        if len(column) != wanted:
            what = "as `queries`" if batch_size is None else "`config.batch_size`"
            raise ValueError(f"`{name}` must have {wanted} rows, {what}, got {len(column)}.")
    found = RolloutRows([], [], [], [])
    for row, (query, response, score) in enumerate(zip(queries, responses, scores, strict=True)):
        ids = as_row(response, f"responses[{row}]")
        mask = _mask(None if response_masks is None else response_masks[row], len(ids), row)
        reward = _reward(score, mask, row)
        if decoder_start_token_id is not None and ids[:1] == [decoder_start_token_id]:
            ids, mask, reward = ids[1:], mask[1:], reward[1:]
        if not mask.any():
            raise ValueError(f"`responses[{row}]` must hold a token that the policy chose, got none.")
        found.queries.append(as_row(query, f"queries[{row}]"))
        found.responses.append(ids)
        found.masks.append(mask)
        found.rewards.append(reward)
        if not found.queries[-1]:
            raise ValueError(f"`queries[{row}]` must hold a token to go on from, got none.")
    return found


def make_sequences(
    rollouts: RolloutRows, *, pad_token_id: int, decoder_start_token_id: int | None, max_positions: int
) -> Sequences:
    """Right-padded rows of few widths, NumPy, with the window of the responses.

    Raises:
      ValueError: If a row is longer than the model has positions.
    """
    width = bucket_length(max(map(len, rollouts.responses)))
    mask = _columns([list(mask) for mask in rollouts.masks], width).astype(bool)
    lengths = np.asarray([len(query) for query in rollouts.queries], np.int32)
    if decoder_start_token_id is not None:
        rows = [[decoder_start_token_id, *response] for response in rollouts.responses]
        context: Any = pad_right(
            rollouts.queries, pad_token_id=pad_token_id, width=bucket_length(int(lengths.max()))
        )
        starts: Any = np.zeros(len(rows), np.int32)
    else:
        rows = [[*pair[0], *pair[1]] for pair in zip(rollouts.queries, rollouts.responses, strict=True)]
        context, starts = (None, None), lengths - 1
    sizes = [len(row) for row in rows]
    if max(sizes) > max_positions:
        raise ValueError(
            f"`queries` and `responses`: row {int(np.argmax(sizes))} has {max(sizes)} tokens, and the model has "
            f"{max_positions} positions."
        )
    padded: Any = pad_right(
        rows, pad_token_id=pad_token_id, width=min(bucket_length(max(sizes)), max_positions)
    )
    inputs = ModelInputs(padded[0], padded[1], None, context[0], context[1])
    any_mask: Any = mask
    return Sequences(inputs, starts, any_mask)


def reward_columns(rollouts: RolloutRows, width: int) -> np.ndarray:
    """Rewards per token, float32 (B T); 0 behind each response."""
    return _columns([list(reward) for reward in rollouts.rewards], width).astype(np.float32)


def model_inputs(
    queries: Sequence[Any],
    responses: Sequence[Any],
    *,
    pad_token_id: int,
    padding_side: str,
    decoder_start_token_id: int | None,
) -> dict[str, np.ndarray]:
    """Inputs of a model from queries and responses, padded to the longest on the tokenizer's side.

    Returns:
      `input_ids` and `attention_mask` (1 on real tokens, told by the lengths), int32; of an encoder-decoder also
      `decoder_input_ids`, from the start id on, and `decoder_attention_mask`.
    """
    questions = [as_row(query, "queries") for query in queries]
    answers = [as_row(response, "responses") for response in responses]
    pad = pad_left if padding_side == "left" else pad_right
    if decoder_start_token_id is None:
        rows = [query + answer for query, answer in zip(questions, answers, strict=True)]
        tokens, mask = pad(rows, pad_token_id=pad_token_id)
        return {"input_ids": tokens, "attention_mask": mask.astype(np.int32)}
    answers = [
        row if row[:1] == [decoder_start_token_id] else [decoder_start_token_id, *row] for row in answers
    ]
    tokens, mask = pad(questions, pad_token_id=pad_token_id)
    found = {"input_ids": tokens, "attention_mask": mask.astype(np.int32)}
    tokens, mask = pad_right(answers, pad_token_id=pad_token_id)
    return found | {"decoder_input_ids": tokens, "decoder_attention_mask": mask.astype(np.int32)}


def action_columns(
    inputs: dict[str, np.ndarray], queries: Sequence[Any], responses: Sequence[Any], response_masks: Any
) -> np.ndarray:
    """Mask of the columns whose *next* token the policy chose, int32 (B, L − 1), whichever side is padded.

    Args:
      inputs: From `model_inputs`.
      queries: As given to it.
      responses: As given to it.
      response_masks: One entry a response token; None: all were chosen.
    """
    encoded = "decoder_input_ids" in inputs
    attention = inputs["decoder_attention_mask" if encoded else "attention_mask"]
    found = np.zeros(attention.shape, np.int32)
    for row, response in enumerate(responses):
        size = len(as_row(response))
        mask = _mask(None if response_masks is None else response_masks[row], size, row)
        first = int(attention[row].argmax())
        if not encoded:
            begin = first + len(as_row(queries[row]))
        else:
            begin = first + int(attention[row].sum()) - size
            if begin == 0:  # the response brought its start id, which nobody chose
                begin, mask = 1, mask[1:]
        found[row, begin : begin + len(mask)] = mask
    return found[:, 1:]


def spread(window: np.ndarray, rollouts: RolloutRows, *, encoded: bool) -> np.ndarray:
    """A window (B T) in the columns of whole rows (B, L − 1), L that of the longest; 0 outside the responses.

    Args:
      window: Index t speaks of response token t.
      rollouts: The rows.
      encoded: Whether an encoder reads the queries.
    """
    starts = [0 if encoded else len(query) - 1 for query in rollouts.queries]
    sizes = [len(response) for response in rollouts.responses]
    found = np.zeros((len(starts), max(a + b for a, b in zip(starts, sizes, strict=True))), window.dtype)
    for row, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        found[row, start : start + size] = window[row, :size]
    return found


def _mask(given: Any, size: int, row: int) -> np.ndarray:
    mask = np.ones(size, bool) if given is None else np.asarray(given) != 0
    if mask.shape != (size,):
        raise ValueError(
            f"`response_masks[{row}]` must have one entry a response token, {size}, got shape {mask.shape}."
        )
    return mask


def _reward(score: Any, mask: np.ndarray, row: int) -> np.ndarray:
    """Reward of each response token."""
    found = np.asarray(score, np.float32)
    if found.size == 1 and found.ndim <= 1:
        placed = np.zeros(mask.shape, np.float32)
        placed[np.flatnonzero(mask)[-1:]] = found.ravel()
        found = placed
    elif found.shape != mask.shape:
        raise ValueError(
            f"`scores[{row}]` must be one number, or one for each of the {len(mask)} response tokens, got shape "
            f"{found.shape}."
        )
    if not np.isfinite(found).all():
        raise ValueError(f"`scores[{row}]` must be finite, got {score!r}.")
    if found[~mask].any():
        raise ValueError(
            f"`scores[{row}]` must be 0 where `response_masks[{row}]` is: nobody chose that token."
        )
    return found


def _columns(rows: Sequence[Sequence[Any]], width: int) -> np.ndarray:
    found = np.zeros((len(rows), width), np.float32)
    for row, values in zip(found, rows, strict=True):
        row[: len(values)] = values
    return found
