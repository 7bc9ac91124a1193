# SPDX-License-Identifier: Apache-2.0
"""π_θ/π_old of whole completions, one value per action: `(logprobs, old_logprobs, advantages, mask) → ρ`.

| | ρ of action t in a row of n | gradient |
|---|---|---|
| `token_ratio` | π_θ/π_old of the action | ρ_t at t |
| `sequence_ratio` | s = exp(mean of log-ratios) | s/n at every action |
| `sequence_token_ratio` | the same value s | s at t |
| `product_ratio` | w = exp(sum of log-ratios) | w at every action |
| `geometric_clipped_ratio` | exp(mean of clipped log-ratios) | of those that were not clipped |

Masked log-probabilities must be 0 on both sides (`zero_masked`). Every log-ratio is clamped to ±20 first.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jrl.ops.checks import Scalar, check_batch
from jrl.ops.masking import masked_mean, masked_sum, zero_masked
from jrl.ops.policy_gradient import MAX_LOG_RATIO, bounded_log_ratio, importance_ratio

_MIN_PRODUCT = 1e-8


def token_ratio(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
) -> Float[Array, "B T"]:
    """ρ_t = π_θ/π_old of each action by itself.

    Args:
      logprobs: log π_θ of the actions, in nats; 0 where masked.
      old_logprobs: log π_old of the actions, in nats; 0 where masked.
      advantages: A; not read here, but by `geometric_clipped_ratio`.
      mask: True on actions.
    Returns:
      In [e^−20, e^20] at each action; 1 where both log-probabilities are 0.
    Reference: Schulman et al. 2017, arXiv:1707.06347, section 3.
    Example:
      >>> new, old = jnp.log(jnp.array([[0.5, 0.4]])), jnp.log(jnp.array([[0.25, 0.2]]))
      >>> round(float(token_ratio(new, old, jnp.ones((1, 2)), jnp.ones((1, 2), bool))[0, 0]), 4)
      2.0
    """
    del advantages, mask
    return importance_ratio(logprobs, old_logprobs)


def sequence_ratio(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
) -> Float[Array, "B T"]:
    """GSPO's: the geometric mean of the row's ratios, the same at every action; the gradient runs through the mean.

    Args:
      logprobs: log π_θ of the actions, in nats; 0 where masked.
      old_logprobs: log π_old of the actions, in nats; 0 where masked.
      advantages: A; not read here, but by `geometric_clipped_ratio`.
      mask: True on actions.
    Returns:
      In [e^−20, e^20], the same in all columns of a row.
    Reference: Zheng et al. 2025, arXiv:2507.18071, eq. 7.
    Example:
      >>> new, old = jnp.log(jnp.array([[0.5, 0.4]])), jnp.log(jnp.array([[0.25, 0.2]]))
      >>> round(float(sequence_ratio(new, old, jnp.ones((1, 2)), jnp.ones((1, 2), bool))[0, 0]), 4)
      2.0
    """
    del advantages
    return _spread(jnp.exp(_mean_log_ratio(logprobs, old_logprobs, mask)), mask)


def sequence_token_ratio(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
) -> Float[Array, "B T"]:
    """GSPO-token's: the value of `sequence_ratio`, whose gradient at each action is that action's own.

    Where all actions of a row share one advantage, loss and gradient are those of `sequence_ratio`.

    Args:
      logprobs: log π_θ of the actions, in nats; 0 where masked.
      old_logprobs: log π_old of the actions, in nats; 0 where masked.
      advantages: A; not read here, but by `geometric_clipped_ratio`.
      mask: True on actions.
    Returns:
      In [e^−20, e^20], the same value in all columns of a row.
    Reference: Zheng et al. 2025, arXiv:2507.18071, eqs. 13 and 14.
    Example:
      >>> new, old = jnp.log(jnp.array([[0.5, 0.4]])), jnp.log(jnp.array([[0.25, 0.2]]))
      >>> round(float(sequence_token_ratio(new, old, jnp.ones((1, 2)), jnp.ones((1, 2), bool))[0, 0]), 4)
      2.0
    """
    del advantages
    mean = jax.lax.stop_gradient(_mean_log_ratio(logprobs, old_logprobs, mask))
    # (ℓ − sg ℓ) is exactly 0 in value: the ratio is that of the sequence to the bit.
    return jnp.exp(mean[:, None] + (logprobs - jax.lax.stop_gradient(logprobs)))


def product_ratio(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
) -> Float[Array, "B T"]:
    """π_θ/π_old of the whole completion, in [1e-8, e^20], the same at every action.

    It moves with the length: 500 actions that drift by 4e-4 each leave ±0.2.

    Args:
      logprobs: log π_θ of the actions, in nats; 0 where masked.
      old_logprobs: log π_old of the actions, in nats; 0 where masked.
      advantages: A; not read here, but by `geometric_clipped_ratio`.
      mask: True on actions.
    Returns:
      The same in all columns of a row.
    Reference: Ahmadian et al. 2024, arXiv:2402.14740, where a completion is one action; the clamp: arXiv:2602.10693.
    Example:
      >>> new, old = jnp.log(jnp.array([[0.5, 0.4]])), jnp.log(jnp.array([[0.25, 0.2]]))
      >>> round(float(product_ratio(new, old, jnp.ones((1, 2)), jnp.ones((1, 2), bool))[0, 0]), 4)
      4.0
    """
    del advantages
    total = masked_sum(_log_ratio(logprobs, old_logprobs, mask), mask, axis=1)
    return _spread(jnp.exp(jnp.clip(total, math.log(_MIN_PRODUCT), MAX_LOG_RATIO)), mask)


def geometric_clipped_ratio(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    clip_range: Scalar,
    clip_range_high: Scalar | None = None,
) -> Float[Array, "B T"]:
    """GMPO's: each log-ratio d is clipped on the side to which the advantage drives it, then the geometric mean taken.

        c_t = min(d_t, ε_high) where A > 0, else max(d_t, −ε);   ρ = exp(Σ c/n)

    Args:
      logprobs: log π_θ.
      old_logprobs: log π_old.
      advantages: A; their signs alone are read.
      mask: True on actions.
      clip_range: ε > 0, in log space; 0.4 in the paper.
      clip_range_high: ε_high; None: ε.
    Returns:
      At most e^ε_high in a row of good actions, at least e^−ε in one of bad ones; the same in all its columns.
    Reference: Zhao et al. 2025, arXiv:2507.20673, eq. 4.
    Example:
      >>> new, old = jnp.log(jnp.array([[0.5, 0.4]])), jnp.log(jnp.array([[0.25, 0.2]]))
      >>> given = jnp.ones((1, 2)), jnp.ones((1, 2), bool)
      >>> round(float(geometric_clipped_ratio(new, old, *given, clip_range=0.4)[0, 0]), 4)
      1.4918
    """
    check_batch(mask, advantages=advantages)
    log_ratio = _log_ratio(logprobs, old_logprobs, mask)
    high = clip_range if clip_range_high is None else clip_range_high
    clipped = jnp.where(advantages > 0, jnp.minimum(log_ratio, high), jnp.maximum(log_ratio, -clip_range))
    return _spread(jnp.exp(masked_mean(clipped, mask, axis=1)), mask)


def _log_ratio(logprobs: Array, old_logprobs: Array, mask: Array) -> Float[Array, "B T"]:
    check_batch(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    return bounded_log_ratio(zero_masked(logprobs, mask), zero_masked(old_logprobs, mask))


def _mean_log_ratio(logprobs: Array, old_logprobs: Array, mask: Array) -> Float[Array, "B"]:
    return masked_mean(_log_ratio(logprobs, old_logprobs, mask), mask, axis=1)


def _spread(per_row: Float[Array, "B"], mask: Array) -> Float[Array, "B T"]:
    return jnp.broadcast_to(per_row[:, None], mask.shape)
