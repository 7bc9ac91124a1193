# SPDX-License-Identifier: Apache-2.0
"""Surrogates for the return of an action beside the clipped one: a loss for each action, unreduced.

Where a surrogate multiplies log π_θ by a detached weight (CISPO, VESPO, DPPO), its gradient is the thing; its value is
no objective, and compares with nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jrl.ops.checks import Scalar, check_positive, check_same_floats

MAX_DPPO_RATIO = 20.0
_MAX_PROBABILITY = 1 - 2.0**-23


def cispo_loss(
    ratio: Float[Array, "*shape"],
    logprobs: Float[Array, "*shape"],
    advantages: Float[Array, "*shape"],
    *,
    clip_range_high: Scalar,
) -> Float[Array, "*shape"]:
    """CISPO: ℓ = −sg(min(ρ, 1+ε_high))·A·log π_θ. Every action keeps a gradient; there is no lower bound.

    Args:
      ratio: ρ; a constant here.
      logprobs: log π_θ; the only argument to differentiate.
      advantages: A.
      clip_range_high: ε_high > −1. TRL's `epsilon_high` is the whole cap, 1 more than this: its default of 0.2 is
        −0.8 here, and scales every loss.
    Returns:
      Loss of each position, of any sign; its value means nothing, its gradient is what counts. Not reduced.
    Reference: MiniMax 2025, arXiv:2506.13585, eq. 4.
    Example:
      >>> ratio, logprobs, advantages = jnp.array([2.0]), jnp.array([-1.0]), jnp.array([3.0])
      >>> [round(float(x), 4) for x in cispo_loss(ratio, logprobs, advantages, clip_range_high=0.5)]
      [4.5]
    """
    _check_alike(ratio, logprobs, advantages)
    check_positive("1 + clip_range_high", 1 + clip_range_high)
    return _weighted(jnp.minimum(ratio, 1 + clip_range_high), logprobs, advantages)


def sapo_loss(
    ratio: Float[Array, "*shape"],
    advantages: Float[Array, "*shape"],
    *,
    temperature_pos: Scalar,
    temperature_neg: Scalar,
) -> Float[Array, "*shape"]:
    """SAPO: a soft gate in the place of the clip, ℓ = −(4/τ)·σ(τ(ρ−1))·A; its slope is −A at ρ = 1.

    Args:
      ratio: ρ; the only argument to differentiate.
      advantages: A.
      temperature_pos: τ where A > 0.
      temperature_neg: τ elsewhere; a little larger, so that bad actions are let go sooner.
    Returns:
      Loss of each position, of the sign of −A; not reduced.
    Reference: Qwen 2025, arXiv:2511.20347, eqs. 5 and 6.
    Example:
      >>> losses = sapo_loss(jnp.array([1.0]), jnp.array([3.0]), temperature_pos=1.0, temperature_neg=1.05)
      >>> losses.tolist()
      [-6.0]
    """
    check_same_floats("advantages", advantages, "ratio", ratio)
    check_positive("temperature_pos", temperature_pos)
    check_positive("temperature_neg", temperature_neg)
    temperature = jnp.where(
        advantages > 0, jnp.asarray(temperature_pos, ratio.dtype), jnp.asarray(temperature_neg, ratio.dtype)
    )
    x = temperature * (ratio - 1.0)
    # σ(x) = 1 − σ(−x): the slope σ(1 − σ) of the first form is what rounding left over once σ is near 1.
    gate = jnp.where(x > 0, 1.0 - jax.nn.sigmoid(-x), jax.nn.sigmoid(x))
    return -(4.0 / temperature) * gate * advantages


def vespo_loss(
    ratio: Float[Array, "*shape"],
    logprobs: Float[Array, "*shape"],
    advantages: Float[Array, "*shape"],
    *,
    k_pos: Scalar,
    lambda_pos: Scalar,
    k_neg: Scalar,
    lambda_neg: Scalar,
) -> Float[Array, "*shape"]:
    """VESPO: ℓ = −sg(φ(w))·A·log π_θ with φ(w) = w^k·exp(λ(1−w)), which is 1 at w = 1.

    Args:
      ratio: w, the product over the completion (`product_ratio`); a constant here.
      logprobs: log π_θ; the only argument to differentiate.
      advantages: A.
      k_pos: k > 0 where A >= 0.
      lambda_pos: λ > 0 there.
      k_neg: k > 0 elsewhere.
      lambda_neg: λ > 0 elsewhere.
    Returns:
      Loss of each position, of any sign; its value means nothing, its gradient is what counts. Not reduced.
    Reference: arXiv:2602.10693 (VESPO), 2026, as TRL 1.16 computes it.
    Example:
      >>> ratio, logprobs, advantages = jnp.array([2.0]), jnp.array([-1.0]), jnp.array([3.0])
      >>> phi = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}
      >>> round(float(vespo_loss(ratio, logprobs, advantages, **phi)[0]), 4)  # φ = 4·e^−3
      0.5974
    """
    _check_alike(ratio, logprobs, advantages)
    positive = advantages >= 0
    k = jnp.where(positive, jnp.asarray(k_pos, ratio.dtype), jnp.asarray(k_neg, ratio.dtype))
    rate = jnp.where(positive, jnp.asarray(lambda_pos, ratio.dtype), jnp.asarray(lambda_neg, ratio.dtype))
    return _weighted(jnp.exp(rate + k * jnp.log(ratio) - rate * ratio), logprobs, advantages)


def dppo_tv_loss(
    ratio: Float[Array, "*shape"],
    logprobs: Float[Array, "*shape"],
    advantages: Float[Array, "*shape"],
    *,
    delta: Scalar,
    delta_high: Scalar | None = None,
) -> Float[Array, "*shape"]:
    """DPPO with the total variation of taking the action or not: ℓ = −sg(min(ρ, 20))·A·log π_θ where it is kept.

    An action is dropped where its probability has moved by more than δ to the side to which A drives it.

    Args:
      ratio: ρ of the token; a constant here.
      logprobs: log π_θ; the only argument to differentiate.
      advantages: A.
      delta: δ > 0 for falling probabilities (A <= 0); 0.15 in the paper.
      delta_high: δ > 0 for rising ones (A > 0); None: the same.
    Returns:
      Loss of each position, 0 where an action is dropped; its value means nothing. Not reduced.
    Reference: arXiv:2602.04879 (DPPO), 2026.
    Example:
      >>> ratio, logprobs, advantages = jnp.array([2.0]), jnp.array([-1.0]), jnp.array([3.0])
      >>> [round(float(x), 4) for x in dppo_tv_loss(ratio, logprobs, advantages, delta=0.15)]
      [0.0]
    """
    _check_alike(ratio, logprobs, advantages)
    check_positive("delta", delta)
    high = delta if delta_high is None else delta_high
    now, old = _probabilities(ratio, logprobs)
    keep = jnp.where(advantages > 0, now - old <= high, now - old >= -delta)
    return _dppo(ratio, logprobs, advantages, keep)


def dppo_kl_loss(
    ratio: Float[Array, "*shape"],
    logprobs: Float[Array, "*shape"],
    advantages: Float[Array, "*shape"],
    *,
    delta: Scalar,
    delta_high: Scalar | None = None,
) -> Float[Array, "*shape"]:
    """DPPO with KL(old ‖ new) of taking the action or not, in nats, in the place of the total variation.

    Args:
      ratio: ρ of the token; a constant here.
      logprobs: log π_θ; the only argument to differentiate.
      advantages: A.
      delta: δ > 0 for falling probabilities (A <= 0).
      delta_high: δ > 0 for rising ones (A > 0); None: the same.
    Returns:
      Loss of each position, 0 where an action is dropped; its value means nothing. Not reduced.
    Reference: arXiv:2602.04879 (DPPO), 2026.
    Example:
      >>> ratio, logprobs, advantages = jnp.array([2.0]), jnp.array([-1.0]), jnp.array([3.0])
      >>> [round(float(x), 4) for x in dppo_kl_loss(ratio, logprobs, advantages, delta=0.15)]
      [6.0]
    """
    _check_alike(ratio, logprobs, advantages)
    check_positive("delta", delta)
    high = delta if delta_high is None else delta_high
    now, old = _probabilities(ratio, logprobs)
    # Log-ratio from the ratio; the second branch from log1p: 1 − p rounds to 0 long before p is 1.
    gap = old * -jnp.log(ratio) + (1.0 - old) * (jnp.log1p(-old) - jnp.log1p(-now))
    left = jnp.where(advantages > 0, (gap > high) & (now > old), (gap > delta) & (now < old))
    return _dppo(ratio, logprobs, advantages, ~left)


def _check_alike(ratio: Array, logprobs: Array, advantages: Array) -> None:
    check_same_floats("ratio", ratio, "logprobs", logprobs)
    check_same_floats("advantages", advantages, "logprobs", logprobs)


def _weighted(weights: Array, logprobs: Array, advantages: Array) -> Float[Array, "*shape"]:
    """−sg(w)·A·log π."""
    return -jax.lax.stop_gradient(weights) * advantages * logprobs


def _probabilities(ratio: Array, logprobs: Array) -> tuple[Array, Array]:
    """π_θ and π_old of the actions, constants, and a little below 1."""
    now = jax.lax.stop_gradient(jnp.exp(logprobs))
    old = now / jax.lax.stop_gradient(ratio)
    return jnp.minimum(now, _MAX_PROBABILITY), jnp.minimum(old, _MAX_PROBABILITY)


def _dppo(
    ratio: Array, logprobs: Array, advantages: Array, keep: Bool[Array, "*shape"]
) -> Float[Array, "*shape"]:
    capped = jnp.minimum(ratio, MAX_DPPO_RATIO)
    return _weighted(jnp.where(keep, capped, 0.0), logprobs, advantages)
