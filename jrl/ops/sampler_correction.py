# SPDX-License-Identifier: Apache-2.0
"""Weights for actions that another policy drew than the one the update starts from.

Three policies: the sampler π_s (an engine with its own kernels or older weights), the anchor π_o (the trainer's, before
the first step), and π_θ. A ratio is clipped around π_o; the loss is multiplied by the constant w = π_o/π_s.

| scheme | made of |
|---|---|
| TIS (truncated importance sampling) | `truncate_weights` of `token_weights` or `sequence_weights` |
| MIS (masked) | `drop_weights` of `sequence_weights`, or of `geometric_weights` within a narrow band |
| IcePop | `drop_weights` of `token_weights` |

Where sampler and anchor agree to the bit, every weight is exactly 1 and each scheme returns the bits of none. A dropped
action weighs 0 in the sum and stays in the denominator. Weights multiply the surrogate, not a KL term, not the entropy.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jrl.ops.checks import Scalar, check_batch, check_float, check_positive
from jrl.ops.masking import masked_mean, masked_sum, zero_masked
from jrl.ops.policy_gradient import MAX_LOG_RATIO, bounded_log_ratio


def token_weights(
    old_logprobs: Float[Array, "B T"], sampler_logprobs: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """π_o/π_s of each action. Right to first order only: the state that the sampler led to is not weighed.

    Args:
      old_logprobs: log π_o.
      sampler_logprobs: log π_s of the distribution that was drawn from, after temperature and filters.
      mask: True on actions; elsewhere the weight is 1.
    Returns:
      In [e^−20, e^20] at each action. No gradient flows through.
    Reference: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy training".
    Example:
      >>> old, sampler = jnp.log(jnp.array([[0.5, 0.4]])), jnp.log(jnp.array([[0.25, 0.4]]))
      >>> [round(float(w), 4) for w in token_weights(old, sampler, jnp.ones((1, 2), bool))[0]]
      [2.0, 1.0]
    """
    return jnp.exp(_log_weights(old_logprobs, sampler_logprobs, mask))


def sequence_weights(
    old_logprobs: Float[Array, "B T"], sampler_logprobs: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """π_o/π_s of the whole completion, the same at every action: unbiased, and wild for long ones.

    Args:
      old_logprobs: log π_o.
      sampler_logprobs: log π_s.
      mask: True on actions.
    Returns:
      In [e^−20, e^20], the same in all columns of a row. No gradient flows through.
    Reference: Liu, Li et al. 2025, "When speed kills stability".
    Example:
      >>> old, sampler = jnp.log(jnp.array([[0.5, 0.4]])), jnp.log(jnp.array([[0.25, 0.4]]))
      >>> [round(float(w), 4) for w in sequence_weights(old, sampler, jnp.ones((1, 2), bool))[0]]
      [2.0, 2.0]
    """
    total = jnp.sum(_log_weights(old_logprobs, sampler_logprobs, mask), axis=1)
    weights = jnp.exp(jnp.clip(total, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return jnp.broadcast_to(weights[:, None], mask.shape)


def geometric_weights(
    old_logprobs: Float[Array, "B T"], sampler_logprobs: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """The geometric mean of a completion's weights, the same at every action: comparable across lengths.

    Args:
      old_logprobs: log π_o.
      sampler_logprobs: log π_s.
      mask: True on actions.
    Returns:
      In [e^−20, e^20], the same in all columns of a row. No gradient flows through.
    Reference: Liu, Li et al. 2025, "When speed kills stability".
    Example:
      >>> old, sampler = jnp.log(jnp.array([[0.5, 0.4]])), jnp.log(jnp.array([[0.25, 0.4]]))
      >>> [round(float(w), 4) for w in geometric_weights(old, sampler, jnp.ones((1, 2), bool))[0]]
      [1.4142, 1.4142]
    """
    mean = masked_mean(_log_weights(old_logprobs, sampler_logprobs, mask), mask, axis=1)
    return jnp.broadcast_to(jnp.exp(mean)[:, None], mask.shape)


def truncate_weights(weights: Float[Array, "B T"], *, cap: Scalar) -> Float[Array, "B T"]:
    """min(w, C): a heavy action counts C times; 2 is usual.

    Args:
      weights: w.
      cap: C > 0.
    Returns:
      At most C; not reduced.
    Reference: Ionides 2008, "Truncated importance sampling"; for language models Yao et al. 2025.
    Example:
      >>> truncate_weights(jnp.array([[0.5, 7.0]]), cap=2.0).tolist()
      [[0.5, 2.0]]
    """
    check_float("weights", weights)
    check_positive("cap", cap)
    return jnp.minimum(weights, cap)


def drop_weights(weights: Float[Array, "B T"], *, low: Scalar, high: Scalar) -> Float[Array, "B T"]:
    """w in [low, high], bounds included, and 0 outside: what the sampler nearly never draws is noise.

    Args:
      weights: w.
      low: At least 0; 0.5 in the paper, 0 leaves small weights.
      high: At least `low`; 5 in the paper.
    Returns:
      0, or in [low, high]; not reduced.
    Raises:
      ValueError: If the bounds leave nothing between them.
    Reference: Ling team 2025, arXiv:2510.18855 (IcePop).
    Example:
      >>> drop_weights(jnp.array([[0.4, 0.5, 5.0, 5.1]]), low=0.5, high=5.0).tolist()
      [[0.0, 0.5, 5.0, 0.0]]
    """
    check_float("weights", weights)
    check_positive("high", high)
    if isinstance(low, int | float) and isinstance(high, int | float) and low > high:
        raise ValueError(f"`low` must be at most `high`, {high}, got {low}: every weight would become 0.")
    return jnp.where((weights < low) | (weights > high), 0.0, weights)


def effective_sample_size(weights: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, ""]:
    """(Σw)²/(n·Σw²) over actions, in (0, 1]: the share of them that the weights leave in effect; 0 if all are 0.

    Args:
      weights: w ≥ 0, as the loss reads them.
      mask: True on actions.
    Returns:
      A scalar, without unit.
    Reference: Kong 1992, "A note on importance sampling using standardized weights".
    Example:
      >>> float(effective_sample_size(jnp.array([[2.0, 0.0]]), jnp.ones((1, 2), bool)))
      0.5
    """
    check_batch(mask, weights=weights)
    total, squares = masked_sum(weights, mask), masked_sum(jnp.square(weights), mask)
    count = jnp.sum(mask, dtype=total.dtype)
    return jnp.where(squares > 0, jnp.square(total) / jnp.where(squares > 0, count * squares, 1.0), 0.0)


def off_policy_rows(
    logprobs: Float[Array, "B T"],
    sampler_logprobs: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    threshold: Scalar,
) -> Bool[Array, "B T"]:
    """True on rows to drop: bad ones (A < 0) that the policy now finds less likely than the sampler did, by far.

        A < 0  and  mean over actions of log π_s − sg log π_θ > δ

    It sees mismatch and staleness together, and is taken anew at every minibatch.

    Args:
      logprobs: log π_θ; no gradient.
      sampler_logprobs: log π_s.
      advantages: A, one value a row at all its actions.
      mask: True on actions.
      threshold: δ, in nats per token.
    Returns:
      The same in all columns of a row.
    Reference: DeepSeek-AI 2025, arXiv:2512.02556 (DeepSeek-V3.2), eq. 9.
    Example:
      >>> now, sampler = jnp.array([[-3.0], [-1.0]]), jnp.array([[-1.0], [-1.0]])
      >>> bad, every = -jnp.ones((2, 1)), jnp.ones((2, 1), bool)
      >>> off_policy_rows(now, sampler, bad, every, threshold=0.5).tolist()
      [[True], [False]]
    """
    check_batch(mask, logprobs=logprobs, sampler_logprobs=sampler_logprobs, advantages=advantages)
    now = jax.lax.stop_gradient(zero_masked(logprobs, mask))
    gap = masked_mean(zero_masked(sampler_logprobs, mask) - now, mask, axis=1)
    is_bad = masked_sum(advantages, mask, axis=1) < 0
    return jnp.broadcast_to((is_bad & (gap > threshold))[:, None], mask.shape)


def _log_weights(old_logprobs: Array, sampler_logprobs: Array, mask: Array) -> Float[Array, "B T"]:
    check_batch(mask, old_logprobs=old_logprobs, sampler_logprobs=sampler_logprobs)
    bounded = bounded_log_ratio(zero_masked(old_logprobs, mask), zero_masked(sampler_logprobs, mask))
    return jax.lax.stop_gradient(bounded)
