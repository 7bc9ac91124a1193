# SPDX-License-Identifier: Apache-2.0
"""trlX's data classes of rollouts: one each, and batches, which compiled functions take as pytrees."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Float, Int


@dataclass
class PPORLElement:
    """A rollout, without padding.

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
