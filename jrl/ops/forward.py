# SPDX-License-Identifier: Apache-2.0
"""A model on a completion window: the one forward pass that scoring and every learner share.

Sampler and learner can only agree if the same function computes both sides of a ratio, so nobody else cuts windows
or reads logits.
"""

from __future__ import annotations

from functools import partial

import jax
from jaxtyping import Array, Float

from jrl.ops.alignment import window_states, window_targets
from jrl.ops.checks import Scalar
from jrl.ops.logprobs import TokenLogprobs, token_logprobs
from jrl.typing import Features, Frozen, Params, PolicyFns, Sequences, Trunk


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
