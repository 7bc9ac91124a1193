# SPDX-License-Identifier: Apache-2.0
"""The forward pass that learners share: a policy's log-probabilities and values on a completion window."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jrl.learners.accumulate import take_rows
from jrl.ops.alignment import window_states, window_targets
from jrl.ops.logprobs import TokenLogprobs, token_logprobs
from jrl.typing import Features, Frozen, ModelInputs, Params, PolicyFns, Sequences, Trunk

Tree = TypeVar("Tree")


def trunk_of_rows(policy: PolicyFns, frozen: Frozen, inputs: ModelInputs, *, minibatch_size: int) -> Trunk:
    """The frozen trunk's output for all rows, computed a microbatch at a time.

    It does not change while only the trainable parameters do, so one pass serves all epochs of an update.

    Returns:
      What `policy.trunk` returns, with the rows of `inputs`; None where nothing below is frozen.
    """
    num_rows = inputs.tokens.shape[0]
    rows = min(minibatch_size, num_rows)
    count = -(-num_rows // rows)
    index = jnp.minimum(jnp.arange(count * rows), num_rows - 1).reshape(count, rows)
    trunk = jax.lax.map(lambda taken: policy.trunk(frozen, take_rows(inputs, taken)), index)
    return jax.tree.map(lambda x: x.reshape(count * rows, *x.shape[2:])[:num_rows], trunk)


def window_features(
    policy: PolicyFns, params: Params, frozen: Frozen, trunk: Trunk, sequences: Sequences
) -> Features:
    """Features of the states from which the window's actions were chosen, rows (B T); without dropout.

    The window is cut out before any head, so the language-model head never runs on prompt positions.
    """
    features = policy.branch(params, frozen, trunk, sequences.inputs, None)
    width = sequences.mask.shape[1]
    cut = partial(window_states, starts=sequences.starts, width=width)
    # One array serves both heads unless the value function has a branch of its own.
    policy_states = cut(features.policy)
    value_states = policy_states if features.value is features.policy else cut(features.value)
    return Features(policy=policy_states, value=value_states)


def window_logprobs(
    policy: PolicyFns,
    params: Params,
    frozen: Frozen,
    hidden: Float[Array, "B T D"],
    sequences: Sequences,
    *,
    temperature: float,
    logprob_chunk_bytes: int,
    vocab_size: int,
    with_entropy: bool,
) -> TokenLogprobs:
    """Log-probabilities of the window's actions under unfiltered logits divided by the temperature."""
    targets = window_targets(sequences.inputs.tokens, sequences.starts, width=sequences.mask.shape[1])
    return token_logprobs(
        partial(policy.logits, params, frozen),
        hidden,
        targets,
        temperature=temperature,
        chunk_bytes=logprob_chunk_bytes,
        vocab_size=vocab_size,
        with_entropy=with_entropy,
    )


def mask_rows(sequences: Sequences, valid: jax.Array) -> Sequences:
    """Rows that are mere padding lose their actions, and with them all weight."""
    return sequences._replace(mask=sequences.mask & valid[:, None])
