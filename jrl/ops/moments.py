# SPDX-License-Identifier: Apache-2.0
"""Running mean and variance of the scores seen so far, kept in the learner's state.

The parallel update of Chan et al.; the batch may be sharded, its statistics are those of the whole.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jrl.ops.checks import check_batch
from jrl.ops.masking import masked_mean, masked_variance

_ROUNDING = 32 * 2.0**-23
"""Relative error of a float32 mean of some thousands of equal numbers."""


class RunningMoments(NamedTuple):
    """Moments of all values so far.

    Attributes:
      mean: Their mean.
      variance: Their population variance (ddof 0); 1 before the first value.
      num_values: Their number.
    """

    mean: Float[Array, ""]
    variance: Float[Array, ""]
    num_values: Float[Array, ""]


def init_moments() -> RunningMoments:
    """Moments before any value: mean 0, variance 1, no values.

    Returns:
      Scalars, float32.
    Reference: none; initial state.
    Example:
      >>> [float(x) for x in init_moments()]
      [0.0, 1.0, 0.0]
    """
    return RunningMoments(mean=jnp.zeros(()), variance=jnp.ones(()), num_values=jnp.zeros(()))


def update_moments(
    moments: RunningMoments, x: Float[Array, "N"], mask: Bool[Array, "N"]
) -> tuple[RunningMoments, Float[Array, ""], Float[Array, ""]]:
    """Takes a batch of values into account.

    Args:
      moments: So far.
      x: New values; the batch is part of its own statistics if it is scaled afterwards.
      mask: True on real rows; the others are padding of the batch.
    Returns:
      The new moments, and mean and standard deviation (ddof 1) of the batch alone.
    Reference: Chan, Golub and LeVeque 1979, eq. 2.1.
    Example:
      >>> moments, mean, std = update_moments(init_moments(), jnp.array([1.0, 3.0]), jnp.ones(2, bool))
      >>> [float(x) for x in moments], float(mean), round(float(std), 4)
      ([2.0, 1.0, 2.0], 2.0, 1.4142)
    """
    check_batch(mask, x=x)
    batch_mean, batch_variance = masked_mean(x, mask), masked_variance(x, mask, ddof=0)
    batch_count = jnp.sum(mask, dtype=moments.num_values.dtype)
    num_values = moments.num_values + batch_count
    new_share = batch_count / jnp.maximum(num_values, 1.0)
    delta = batch_mean - moments.mean
    variance = (
        moments.variance * (1.0 - new_share)
        + batch_variance * new_share
        + jnp.square(delta) * new_share * (1.0 - new_share)
    )
    new_moments = RunningMoments(moments.mean + delta * new_share, variance, num_values)
    return new_moments, batch_mean, jnp.sqrt(masked_variance(x, mask, ddof=1))


def moments_std(moments: RunningMoments) -> Float[Array, ""]:
    """Standard deviation (ddof 1), to divide scores by.

    1 where there is no spread to speak of: fewer than two values, or values equal up to the rounding of their
    mean. Dividing by what rounding left over would turn equal scores into noise a million times their size.

    Args:
      moments: So far.
    Returns:
      A number > 0.
    Reference: none; Bessel's correction of the population variance.
    Example:
      >>> round(float(moments_std(RunningMoments(jnp.array(2.0), jnp.array(1.0), jnp.array(2.0)))), 4)
      1.4142
    """
    std = jnp.sqrt(moments.variance * moments.num_values / jnp.maximum(moments.num_values - 1.0, 1.0))
    has_spread = std > _ROUNDING * jnp.abs(moments.mean)
    return jnp.where((moments.num_values > 1) & has_spread, std, 1.0)
