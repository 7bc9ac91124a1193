# SPDX-License-Identifier: Apache-2.0
"""A model on a completion window: the one forward pass that scoring and every learner share.

Sampler and learner can only agree if the same function computes both sides of a ratio, so nobody else cuts windows
or reads logits.
"""

from __future__ import annotations

from functools import partial

import jax
from jaxtyping import Array, Float, Int

from jrl.ops.alignment import states_at, window_columns, window_targets
from jrl.ops.checks import Scalar
from jrl.ops.logprobs import TokenLogprobs, token_logprobs
from jrl.typing import Features, Frozen, ModelInputs, Params, PolicyFns, Sequences, Trunk


def window_features(
    policy: PolicyFns, params: Params, frozen: Frozen, trunk: Trunk, sequences: Sequences
) -> Features:
    """Features of the states from which the window's actions were chosen, rows (B T); without dropout.

    The window is cut out before any head, so the language-model head never runs on prompt positions.
    """
    length, width = sequences.inputs.tokens.shape[1], sequences.mask.shape[1]
    columns = window_columns(sequences.starts, width=width, length=length)
    return column_features(policy, params, frozen, trunk, sequences.inputs, columns)


def column_features(
    policy: PolicyFns,
    params: Params,
    frozen: Frozen,
    trunk: Trunk,
    inputs: ModelInputs,
    columns: Int[Array, "B T"],
) -> Features:
    """Features of the states at these columns, rows (B T); without dropout. `window_features` is its plain case."""
    features = policy.branch(params, frozen, trunk, inputs, None)
    # One array serves both heads unless the value function has a branch of its own.
    policy_states = states_at(features.policy, columns)
    shared = features.value is features.policy
    return Features(policy_states, policy_states if shared else states_at(features.value, columns))


def window_logprobs(
    policy: PolicyFns,
    params: Params,
    frozen: Frozen,
    hidden: Float[Array, "B T D"],
    sequences: Sequences,
    *,
    temperature: Scalar,
    chunk_bytes: int,
    with_entropy: bool = False,
) -> TokenLogprobs:
    """Log-probabilities of the window's actions under unfiltered logits divided by the temperature.

    Args:
      policy: The model.
      params: Its trainable parameters.
      frozen: The rest.
      hidden: `window_features(...).policy`.
      sequences: The rows.
      temperature: Of the rollouts; > 0.
      chunk_bytes: Most bytes of float32 logits held at a time; see `token_logprobs`.
      with_entropy: Whether to return the entropy as well.
    Returns:
      Unmasked: what stands at mask 0 is finite and means nothing.
    """
    logits_fn = partial(policy.logits, params, frozen)
    return token_logprobs(
        logits_fn,
        hidden,
        window_targets(sequences.inputs.tokens, sequences.starts, width=sequences.mask.shape[1]),
        temperature=temperature,
        chunk_bytes=chunk_bytes,
        vocab_size=jax.eval_shape(logits_fn, hidden[:, 0]).shape[-1],
        with_entropy=with_entropy,
    )
