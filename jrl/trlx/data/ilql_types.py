# SPDX-License-Identifier: Apache-2.0
"""trlX's data classes of rewarded samples: one each, and batches, which compiled functions take as pytrees."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Float, Int


@dataclass
class ILQLElement:
    """A rewarded sample, without padding. A batch of them has the same arrays with one axis more, B, in front.

    Attributes:
      input_ids: Ids, (L,).
      attention_mask: 1 on all of them, (L,).
      rewards: Of each action, (T,).
      states_ixs: Column of each state, (T + 1,): the one before each action, and the last column.
      actions_ixs: Column before each action's token, (T,).
      dones: 1 while the row goes on and 0 at its last state, (T + 1,), as trlX has it.
    """

    input_ids: Int[np.ndarray, "*B L"]
    attention_mask: Int[np.ndarray, "*B L"]
    rewards: Float[np.ndarray, "*B T"]
    states_ixs: Int[np.ndarray, "*B T+1"]
    actions_ixs: Int[np.ndarray, "*B T"]
    dones: Int[np.ndarray, "*B T+1"]


@dataclass
class ILQLSeq2SeqElement:
    """A rewarded sample of a seq2seq model: indices are those of `decoder_input_ids`, which begin with the start id."""

    input_ids: Int[np.ndarray, "*B C"]
    attention_mask: Int[np.ndarray, "*B C"]
    decoder_input_ids: Int[np.ndarray, "*B L"]
    rewards: Float[np.ndarray, "*B T"]
    states_ixs: Int[np.ndarray, "*B T+1"]
    actions_ixs: Int[np.ndarray, "*B T"]
    dones: Int[np.ndarray, "*B T+1"]


@jax.tree_util.register_dataclass
@dataclass
class ILQLBatch(ILQLElement):
    """Elements of one batch, every array right-padded with 0."""


@jax.tree_util.register_dataclass
@dataclass
class ILQLSeq2SeqBatch(ILQLSeq2SeqElement):
    """Elements of one batch, every array right-padded with 0."""
