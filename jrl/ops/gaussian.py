# SPDX-License-Identifier: Apache-2.0
"""Diagonal Gaussians with one deviation a row: densities and divergences, averaged over the elements of the row.

A mean and not a sum: the figures are of one element, whatever the number of elements. Summed over the 16,384 elements
of a 512 pixel image's latents, a network's rounding errors alone would make any probability ratio useless.

Reference: none; textbook density and divergence.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from jrl.ops.checks import check_float, check_same_floats

_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


def gaussian_logprob(
    x: Float[Array, "B *shape"], mean: Float[Array, "B *shape"], std: Float[Array, "B"]
) -> Float[Array, "B"]:
    """Mean log-density of an element of each row, in nats.

        log p = mean_d [ −(x_d − μ_d)²/(2σ²) ] − ln σ − ½ ln 2π

    Args:
      x: Points.
      mean: μ.
      std: σ > 0, one for all elements of a row.
    Returns:
      One number a row; −ln σ − ½ ln 2π at the mean.
    Raises:
      ValueError: If the points and the means differ in shape.
    Example:
      >>> round(float(gaussian_logprob(jnp.zeros((1, 4)), jnp.zeros((1, 4)), jnp.ones(1))[0]), 4)
      -0.9189
    """
    check_same_floats("mean", mean, "x", x)
    check_float("std", std)
    return -_mean_square(x - mean) / (2.0 * jnp.square(std)) - jnp.log(std) - _HALF_LOG_TWO_PI


def gaussian_kl(
    mean: Float[Array, "B *shape"], ref_mean: Float[Array, "B *shape"], std: Float[Array, "B"]
) -> Float[Array, "B"]:
    """KL divergence of two Gaussians of equal deviation, per element of each row, in nats; the same either way round.

        KL = ½·mean_d (μ_d − μ_ref,d)² / σ²

    Args:
      mean: μ.
      ref_mean: μ of the other one.
      std: σ > 0 of both.
    Returns:
      One number >= 0 a row.
    Raises:
      ValueError: If the means differ in shape.
    Example:
      >>> float(gaussian_kl(jnp.ones((1, 4)), jnp.zeros((1, 4)), jnp.full(1, 0.5))[0])
      2.0
    """
    check_same_floats("ref_mean", ref_mean, "mean", mean)
    check_float("std", std)
    return _mean_square(mean - ref_mean) / (2.0 * jnp.square(std))


def _mean_square(x: Float[Array, "B *shape"]) -> Float[Array, "B"]:
    return jnp.mean(jnp.square(x), axis=tuple(range(1, x.ndim)))
