# SPDX-License-Identifier: Apache-2.0
"""Clipped objectives of proximal policy optimisation, one value per action, and counts of clipping.

Shared by every algorithm with a probability ratio. Nothing is masked or reduced here: give masked positions
harmless inputs (`zero_masked`), and reduce with `jrl.ops.reductions`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jrl.ops.checks import Scalar, check_positive, check_same_floats

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ± this before exp: far outside any trust region, far inside float32."""


def bounded_log_ratio(
    logprobs: Float[Array, "*shape"], old_logprobs: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """log π_θ − log π_old in [−20, 20]; beyond that it is clamped and passes no gradient.

    Args:
      logprobs: log π_θ of the actions, in nats.
      old_logprobs: log π_old of the actions, in nats.
    Returns:
      Nats at each position; not reduced.
    Raises:
      ValueError: If the shapes differ.
      TypeError: If either is not of a float dtype.
    Reference: none; the clamp is ours, and keeps its exponential finite in float32.
    Example:
      >>> bounded_log_ratio(jnp.array([-1.0, -200.0]), jnp.array([-1.5, -400.0])).tolist()
      [0.5, 20.0]
    """
    check_same_floats("old_logprobs", old_logprobs, "logprobs", logprobs)
    return jnp.clip(logprobs - old_logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def importance_ratio(
    logprobs: Float[Array, "*shape"], old_logprobs: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """π_θ/π_old of the sampled actions, in [e^−20, e^20]; beyond that it is clamped and passes no gradient.

    Args:
      logprobs: log π_θ of the actions, in nats.
      old_logprobs: log π_old of the actions, in nats.
    Returns:
      Above 0 at each position; not reduced.
    Raises:
      ValueError: If the shapes differ.
      TypeError: If either is not of a float dtype.
    Reference: Schulman et al. 2017, arXiv:1707.06347, section 3; the clamp is ours.
    Example:
      >>> ratio = importance_ratio(jnp.array([-1.0, -200.0]), jnp.array([-1.0, -400.0]))
      >>> jnp.log(ratio).tolist()
      [0.0, 20.0]
    """
    return jnp.exp(bounded_log_ratio(logprobs, old_logprobs))


def clipped_surrogate(
    logprobs: Float[Array, "*shape"],
    old_logprobs: Float[Array, "*shape"],
    advantages: Float[Array, "*shape"],
    *,
    clip_range: Scalar,
) -> Float[Array, "*shape"]:
    """PPO's clipped surrogate as a loss, one value per action.

        ℓ = −min(ρA, clip(ρ, 1−ε, 1+ε)·A),   ρ = π_θ/π_old

    Args:
      logprobs: log π_θ of the sampled actions, in nats; the only argument to differentiate.
      old_logprobs: Under the policy before the update.
      advantages: A, usually whitened.
      clip_range: ε > 0, half-width of the trust region around ρ = 1; 0.2 is usual.
    Returns:
      Loss to minimise, one value per action, unreduced. No gradient where A > 0 and ρ > 1+ε, or A < 0 and ρ < 1−ε.
    Raises:
      ValueError: If the arrays differ in shape or ε is not positive.
    Reference: Schulman et al. 2017, arXiv:1707.06347, eq. 7, sign reversed.
    Example:
      >>> arrays = jnp.array([[-0.5]]), jnp.array([[-1.0]]), jnp.array([[2.0]])  # ρ = 1.65, A = 2
      >>> round(float(clipped_surrogate(*arrays, clip_range=0.2)[0, 0]), 4)
      -2.4
    """
    check_same_floats("advantages", advantages, "logprobs", logprobs)
    return clipped_ratio_loss(importance_ratio(logprobs, old_logprobs), advantages, clip_range=clip_range)


def clipped_ratio_loss(
    ratio: Float[Array, "*shape"],
    advantages: Float[Array, "*shape"],
    *,
    clip_range: Scalar,
    clip_range_high: Scalar | None = None,
    max_ratio: Scalar | None = None,
    dual_clip: Scalar | None = None,
) -> Float[Array, "*shape"]:
    """`clipped_surrogate` of a ratio that is at hand, of a token or of a whole completion.

        ℓ = −min(min(ρ, δ)·A, clip(ρ, 1−ε, 1+ε_high)·A);   for A < 0 at most −c·A

    Args:
      ratio: ρ > 0; the only argument to differentiate.
      advantages: A.
      clip_range: ε > 0.
      clip_range_high: ε_high > 0, the upper half-width where it differs ("clip-higher"); None: ε.
      max_ratio: δ > 1+ε_high, the cap of the unclipped term; None: there is none. It acts where A < 0 alone.
      dual_clip: c > 1, the largest loss of a bad action in units of |A|; None: a loss grows with ρ without bound.
    Returns:
      Loss of each position, of any sign, in units of the advantage; not reduced.
    Raises:
      ValueError: If the arrays differ in shape, a range is not positive, or a bound is not above 1.
    Reference: Schulman et al. 2017, arXiv:1707.06347, eq. 7, sign reversed; clip-higher: Yu et al. 2025,
      arXiv:2503.14476, eq. 10; δ: arXiv:2505.07291; dual clip: Ye et al. 2020, arXiv:1912.09729, eq. 5.
    Example:
      >>> round(float(clipped_ratio_loss(jnp.array([1.65]), jnp.array([2.0]), clip_range=0.2)[0]), 4)
      -2.4
      >>> clipped_ratio_loss(jnp.array([9.0]), jnp.array([-2.0]), clip_range=0.2, dual_clip=3.0).tolist()
      [6.0]
    """
    check_same_floats("advantages", advantages, "ratio", ratio)
    check_positive("clip_range", clip_range)
    high = clip_range if clip_range_high is None else clip_range_high
    check_positive("clip_range_high", high)
    _check_above("max_ratio", max_ratio, 1 + high)
    _check_above("dual_clip", dual_clip, 1)
    capped = ratio if max_ratio is None else jnp.minimum(ratio, max_ratio)
    losses = -jnp.minimum(capped * advantages, jnp.clip(ratio, 1 - clip_range, 1 + high) * advantages)
    if dual_clip is None:
        return losses
    return jnp.where(advantages < 0, jnp.minimum(losses, -dual_clip * advantages), losses)


def _check_above(name: str, value: Scalar | None, bound: Scalar) -> None:
    """Raises ValueError if a Python number is not above a bound; what is traced cannot be looked at."""
    if isinstance(value, int | float) and isinstance(bound, int | float) and not value > bound:
        raise ValueError(f"`{name}` must be > {bound}, got {value}.")


def reinforce_loss(
    logprobs: Float[Array, "*shape"], advantages: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """REINFORCE as a loss, one value per action: ℓ = −A·log π_θ.

    Its gradient is −A·∇log π_θ, right while the policy is the one that sampled. The value means nothing.

    Args:
      logprobs: log π_θ of the sampled actions, in nats; the only argument to differentiate.
      advantages: A.
    Returns:
      Loss of each position, of any sign; not reduced.
    Raises:
      ValueError: If the arrays differ in shape.
    Reference: Williams 1992, "Simple statistical gradient-following algorithms", eq. 4.
    Example:
      >>> reinforce_loss(jnp.array([-0.5]), jnp.array([2.0])).tolist()
      [1.0]
    """
    check_same_floats("advantages", advantages, "logprobs", logprobs)
    return -advantages * logprobs


def clipped_value_loss(
    values: Float[Array, "B T"],
    old_values: Float[Array, "B T"],
    returns: Float[Array, "B T"],
    *,
    clip_range: Scalar,
) -> Float[Array, "B T"]:
    """Squared error of the critic, with the step from the old value clipped; the larger of the two counts.

        ℓ = ½·max((V − R)², (V_old + clip(V − V_old, −ε, ε) − R)²)

    Args:
      values: V of the state before each action; the only argument to differentiate.
      old_values: Before the update.
      returns: Raw advantages + old values, taken before whitening.
      clip_range: ε > 0, in units of the value.
    Returns:
      Loss >= 0, (B T), unreduced, the ½ included. No gradient where the clipped error is the larger one.
    Raises:
      ValueError: If the arrays differ in shape or ε is not positive.
    Reference: Schulman et al. 2017, code of arXiv:1707.06347 (OpenAI baselines, ppo2); not in the paper.
    Example:
      >>> arrays = jnp.array([[2.0]]), jnp.array([[0.0]]), jnp.array([[3.0]])  # clipped: V = 0.2
      >>> round(float(clipped_value_loss(*arrays, clip_range=0.2)[0, 0]), 4)  # ½·2.8²
      3.92
    """
    error, clipped_error = _value_errors(values, old_values, returns, clip_range)
    return 0.5 * jnp.maximum(error, clipped_error)


def value_clip_events(
    values: Float[Array, "B T"],
    old_values: Float[Array, "B T"],
    returns: Float[Array, "B T"],
    *,
    clip_range: Scalar,
) -> Bool[Array, "B T"]:
    """True where `clipped_value_loss` takes the clipped branch, so that the critic gets no gradient.

    Args:
      values: V of the state before each action.
      old_values: Before the update.
      returns: Target of the critic.
      clip_range: ε > 0, in units of the value.
    Returns:
      One claim for each action; not reduced.
    Raises:
      ValueError: If the arrays differ in shape or ε is not positive.
    Reference: none; counts branches of `clipped_value_loss`.
    Example:
      >>> values, old_values, returns = jnp.array([[2.0, 0.1]]), jnp.zeros((1, 2)), jnp.full((1, 2), 3.0)
      >>> value_clip_events(values, old_values, returns, clip_range=0.2).tolist()
      [[True, False]]
    """
    error, clipped_error = _value_errors(values, old_values, returns, clip_range)
    # Within the range both are one number up to rounding, and rounding is no clipping.
    return (clipped_error > error) & (jnp.abs(values - old_values) > clip_range)


def _value_errors(
    values: Array, old_values: Array, returns: Array, clip_range: Scalar
) -> tuple[Array, Array]:
    """Squared errors of the value and of the value clipped around the old one."""
    check_same_floats("old_values", old_values, "values", values)
    check_same_floats("returns", returns, "values", values)
    check_positive("clip_range", clip_range)
    clipped = old_values + jnp.clip(values - old_values, -clip_range, clip_range)
    return jnp.square(values - returns), jnp.square(clipped - returns)


class ClipEvents(NamedTuple):
    """Masks of the actions whose clipped surrogate gives no gradient, by side and by sign of the advantage.

    Attributes:
      high_positive: A > 0 and ρ > 1+ε: a good action already made likely enough.
      low_negative: A < 0 and ρ < 1−ε: a bad action already made unlikely enough.
    """

    high_positive: Bool[Array, "*shape"]
    low_negative: Bool[Array, "*shape"]


def clip_events(
    logprobs: Float[Array, "*shape"],
    old_logprobs: Float[Array, "*shape"],
    advantages: Float[Array, "*shape"],
    *,
    clip_range: Scalar,
) -> ClipEvents:
    """Marks the actions that `clipped_surrogate` clips, each side by itself.

    A single fraction would hide that clipping happens on one side only.

    Args:
      logprobs: log π_θ of the actions, in nats.
      old_logprobs: log π_old of the actions, in nats.
      advantages: A.
      clip_range: ε > 0.
    Returns:
      A claim for each position and side; not reduced.
    Raises:
      ValueError: If the shapes differ.
    Reference: none; counts branches of `clipped_surrogate`.
    Example:
      >>> events = clip_events(jnp.array([-0.5]), jnp.array([-1.0]), jnp.array([2.0]), clip_range=0.2)  # ρ = 1.65
      >>> events.high_positive.tolist(), events.low_negative.tolist()
      ([True], [False])
    """
    return ratio_clip_events(importance_ratio(logprobs, old_logprobs), advantages, clip_range=clip_range)


def ratio_clip_events(
    ratio: Float[Array, "*shape"],
    advantages: Float[Array, "*shape"],
    *,
    clip_range: Scalar,
    clip_range_high: Scalar | None = None,
) -> ClipEvents:
    """Marks the actions that `clipped_ratio_loss` clips, at the level of the ratio that it was given.

    Args:
      ratio: ρ, of a token or of a whole completion.
      advantages: A.
      clip_range: ε > 0.
      clip_range_high: The upper half-width where it differs; None: ε.
    Returns:
      A claim for each position and side; not reduced.
    Raises:
      ValueError: If the shapes differ.
    Reference: none; counts branches of `clipped_ratio_loss`.
    Example:
      >>> events = ratio_clip_events(jnp.array([1.25]), jnp.array([2.0]), clip_range=0.2, clip_range_high=0.28)
      >>> events.high_positive.tolist()
      [False]
    """
    check_same_floats("advantages", advantages, "ratio", ratio)
    high = clip_range if clip_range_high is None else clip_range_high
    return ClipEvents(
        high_positive=(advantages > 0) & (ratio > 1 + high),
        low_negative=(advantages < 0) & (ratio < 1 - clip_range),
    )
