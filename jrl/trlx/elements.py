# SPDX-License-Identifier: Apache-2.0
"""trlX's data classes, filled with NumPy arrays: one sample each, and batches of them.

Batches are pytrees, so that compiled functions take them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int


@dataclass
class GeneralElement:
    """Whatever a pipeline yields."""


@dataclass
class RLElement:
    """One step of an episode.

    Attributes:
      state: Prompts.
      action: Ids written after them, (T,).
      reward: Of that action.
    """

    state: Iterable[str] | None = None
    action: Int[np.ndarray, "T"] | None = None
    reward: float | None = None


@dataclass
class BatchElement:
    """What a transformer reads.

    Attributes:
      tokens: Ids, (B L).
      masks: 1 on real tokens, (B L).
    """

    tokens: Int[np.ndarray, "B L"]
    masks: Int[np.ndarray, "B L"]


@dataclass
class PromptElement:
    """One prompt: its text and its ids (P,)."""

    text: str
    tokens: Int[np.ndarray, "P"]


@dataclass
class PromptBatch:
    """Prompts: their texts and their ids (B P)."""

    text: Iterable[str]
    tokens: Int[np.ndarray, "B P"]


@dataclass
class AccelerateRLElement:
    """One output: its ids and a reward for each, (T,)."""

    output_tokens: Int[np.ndarray, "T"]
    rewards: Float[np.ndarray, "T"]


@dataclass
class AccelerateRLBatchElement:
    """Outputs: their ids and a reward for each, (B T)."""

    output_tokens: Int[np.ndarray, "B T"]
    rewards: Float[np.ndarray, "B T"]


@dataclass
class DialogMessage:
    """One message of a dialogue.

    Attributes:
      is_output: Whether the model should have written it.
      tokens: Ids.
    """

    is_output: bool
    tokens: tuple[int, ...]


@dataclass
class PPORLElement:
    """One rollout, without padding.

    Attributes:
      query_tensor: Ids of the prompt, (P,).
      response_tensor: Sampled ids, the EOS included, (T,); of a seq2seq model with the start id before them.
      logprobs: Of the sampled ids under the policy that sampled them, (T,).
      values: Of the state before each, (T,).
      rewards: Of each: scores on the tokens they belong to, minus the KL penalty, (T,).
    """

    query_tensor: Int[np.ndarray, "P"]
    response_tensor: Int[np.ndarray, "T"]
    logprobs: Float[np.ndarray, "T"]
    values: Float[np.ndarray, "T"]
    rewards: Float[np.ndarray, "T"]


@jax.tree_util.register_dataclass
@dataclass
class PPORLBatch:
    """Rollouts of one batch: queries padded on the store's side, everything else on the right.

    Attributes:
      query_tensors: (B P).
      response_tensors: (B T).
      logprobs: (B T); 0 on padding, as are values and rewards.
      values: (B T).
      rewards: (B T).
      query_lengths: Real ids of each query, (B,): where the pad token is a token of the text too, ids do not tell.
        None: they are told by the ids.
      response_lengths: Actions of each response, (B,); None: they are told by the ids and the figures.
    """

    query_tensors: Int[np.ndarray, "B P"]
    response_tensors: Int[np.ndarray, "B T"]
    logprobs: Float[np.ndarray, "B T"]
    values: Float[np.ndarray, "B T"]
    rewards: Float[np.ndarray, "B T"]
    query_lengths: Int[np.ndarray, "B"] | None = None
    response_lengths: Int[np.ndarray, "B"] | None = None


@dataclass
class ILQLElement:
    """One rewarded sample, without padding.

    Attributes:
      input_ids: Ids, (L,).
      attention_mask: 1 on all of them, (L,).
      rewards: Of each action, (T,).
      states_ixs: Column of each state, (T + 1,): the one before each action, and the last column.
      actions_ixs: Column before each action's token, (T,).
      dones: 1 while the row goes on and 0 at its last state, (T + 1,), as trlX has it.
    """

    input_ids: Int[np.ndarray, "L"]
    attention_mask: Int[np.ndarray, "L"]
    rewards: Float[np.ndarray, "T"]
    states_ixs: Int[np.ndarray, "T+1"]
    actions_ixs: Int[np.ndarray, "T"]
    dones: Int[np.ndarray, "T+1"]


@dataclass
class ILQLSeq2SeqElement:
    """The same of a seq2seq model: indices speak of `decoder_input_ids`, which begin with the start id."""

    input_ids: Int[np.ndarray, "C"]
    attention_mask: Int[np.ndarray, "C"]
    decoder_input_ids: Int[np.ndarray, "L"]
    rewards: Float[np.ndarray, "T"]
    states_ixs: Int[np.ndarray, "T+1"]
    actions_ixs: Int[np.ndarray, "T"]
    dones: Int[np.ndarray, "T+1"]


@jax.tree_util.register_dataclass
@dataclass
class ILQLBatch:
    """Elements of one batch, every array right-padded with 0."""

    input_ids: Int[np.ndarray, "B L"]
    attention_mask: Int[np.ndarray, "B L"]
    rewards: Float[np.ndarray, "B T"]
    states_ixs: Int[np.ndarray, "B T+1"]
    actions_ixs: Int[np.ndarray, "B T"]
    dones: Int[np.ndarray, "B T+1"]


@jax.tree_util.register_dataclass
@dataclass
class ILQLSeq2SeqBatch:
    """Elements of one batch, every array right-padded with 0."""

    input_ids: Int[np.ndarray, "B C"]
    attention_mask: Int[np.ndarray, "B C"]
    decoder_input_ids: Int[np.ndarray, "B L"]
    rewards: Float[np.ndarray, "B T"]
    states_ixs: Int[np.ndarray, "B T+1"]
    actions_ixs: Int[np.ndarray, "B T"]
    dones: Int[np.ndarray, "B T+1"]


def stacked(arrays: Iterable[Any], *, fill: float = 0, left: bool = False) -> np.ndarray:
    """Ragged rows as one array, filled up to the longest.

    Args:
      arrays: One-dimensional, of one type.
      fill: Stands where a row has ended.
      left: Whether rows end together instead of beginning together.
    """
    rows = [np.asarray(array) for array in arrays]
    width = max(len(row) for row in rows)
    found = np.full((len(rows), width), fill, rows[0].dtype)
    for number, row in enumerate(rows):
        found[number, width - len(row) if left else 0 :][: len(row)] = row
    return found
