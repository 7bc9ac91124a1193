# SPDX-License-Identifier: Apache-2.0
"""Sums, means and whitening over the positions where a mask is True.

What stands at masked positions is irrelevant, NaN and inf included: it is replaced by 0 before any
arithmetic, so neither the value nor the gradient can meet it. Sums run over the whole array, over all devices
when it is sharded.

Reference: none, unless a function names one; plain arithmetic.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from jrl.ops.checks import check_mask, check_same_shape


def at_least_float32(x: Shaped[Array, "*shape"]) -> Float[Array, "*shape"]:
    """`x` as float32, or unchanged where it is float64: statistics and losses never run in bfloat16.

    Args:
      x: Of any dtype.
    Returns:
      float32, or float64 where it came in.
    Example:
      >>> at_least_float32(jnp.array([1, 2])).dtype.name
      'float32'
    """
    return x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)


def zero_masked(x: Shaped[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Float[Array, "*shape"]:
    """`x` with 0 where `mask` is False, as float32. Apply it to inputs: later is too late for gradients.

    Args:
      x: Values.
      mask: True where a value counts.
    Returns:
      Of the shape of `x`, float32 or better; no gradient where the mask is False.
    Raises:
      ValueError: If the shapes differ.
      TypeError: If the mask is not boolean.
    Example:
      >>> zero_masked(jnp.array([1.0, jnp.nan]), jnp.array([True, False])).tolist()
      [1.0, 0.0]
    """
    check_mask(mask)
    check_same_shape("x", x, "mask", mask)
    return jnp.where(mask, at_least_float32(x), 0.0)


def masked_sum(
    x: Shaped[Array, "*shape"], mask: Bool[Array, "*shape"], *, axis: int | None = None
) -> Float[Array, "..."]:
    """Sum of `x` where `mask` is True, over everything or along `axis`.

    Args:
      x: Values.
      mask: True where a value counts.
      axis: Axis to sum over; None: all.
    Returns:
      In units of `x`, without the summed axis; 0 where nothing counts.
    Example:
      >>> float(masked_sum(jnp.array([1.0, jnp.nan, 5.0]), jnp.array([True, False, True])))
      6.0
    """
    return jnp.sum(zero_masked(x, mask), axis=axis)


def masked_mean(
    x: Shaped[Array, "*shape"], mask: Bool[Array, "*shape"], *, axis: int | None = None
) -> Float[Array, "..."]:
    """Mean of `x` where `mask` is True, over everything or along `axis`; 0 where nothing is.

    Args:
      x: Values.
      mask: True where a value counts.
      axis: Axis to average over; None: all.
    Returns:
      In units of `x`, without the averaged axis.
    Example:
      >>> float(masked_mean(jnp.array([1.0, jnp.nan, 5.0]), jnp.array([True, False, True])))
      3.0
    """
    total = masked_sum(x, mask, axis=axis)
    return total / jnp.maximum(jnp.sum(mask, axis=axis, dtype=total.dtype), 1.0)


def masked_variance(
    x: Shaped[Array, "*shape"], mask: Bool[Array, "*shape"], *, ddof: int = 1
) -> Float[Array, ""]:
    """Variance of `x` where `mask` is True.

    Args:
      x: Values.
      mask: True where a value counts.
      ddof: Subtracted from the count n in the denominator: 1 is unbiased, 0 the variance of a population.
    Returns:
      Σ(x − mean)²/(n − ddof), and 0 where n <= ddof: a single value has no spread to estimate.
    Example:
      >>> float(masked_variance(jnp.array([1.0, 9.0, 3.0]), jnp.array([True, False, True])))
      2.0
    """
    deviations = zero_masked(x, mask) - masked_mean(x, mask)
    count = jnp.sum(mask, dtype=deviations.dtype)
    return masked_sum(jnp.square(deviations), mask) / jnp.maximum(count - ddof, 1.0)


def whiten(
    x: Shaped[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    *,
    shift_mean: bool = True,
    ddof: int = 1,
    epsilon: float = 1e-8,
) -> Float[Array, "*shape"]:
    """Scales `x` to unit variance over the True positions of `mask`, and centres it if asked.

        x̂ = (x − μ)·(σ² + ε)^(−½)  (+ μ without `shift_mean`)

    Args:
      x: Advantages, or rewards (then without `shift_mean`: moving the mean of a reward changes the task).
      mask: True where a value counts. Masked positions neither enter the statistics nor keep a value.
      shift_mean: Whether the mean is removed; if not, it stays where it was.
      ddof: Of σ²; 0 is the variance of a population.
      epsilon: Added to the variance.
    Returns:
      Whitened values, 0 where `mask` is False. No gradient flows through.
    Reference: Ziegler et al. 2019, arXiv:1909.08593, code; there with ddof 0.
    Example:
      >>> [round(x, 4) for x in whiten(jnp.array([1.0, 2.0, 3.0, 4.0]), jnp.ones(4, bool)).tolist()]
      [-1.1619, -0.3873, 0.3873, 1.1619]
    """
    mean, variance = masked_mean(x, mask), masked_variance(x, mask, ddof=ddof)
    whitened = whitened_by(
        zero_masked(x, mask), mean=mean, variance=variance, shift_mean=shift_mean, epsilon=epsilon
    )
    return jax.lax.stop_gradient(zero_masked(whitened, mask))


def whitened_by(
    x: Float[Array, "*shape"],
    *,
    mean: Float[Array, ""],
    variance: Float[Array, ""],
    shift_mean: bool = True,
    epsilon: float = 1e-8,
) -> Float[Array, "*shape"]:
    """Every value in units of a given deviation: `whiten` where the statistics are those of other values, or known.

    Args:
      x: Values; all of them are read, and gradients flow through.
      mean: μ.
      variance: σ².
      shift_mean: Whether the mean is removed; if not, it stays where it was.
      epsilon: Added to the variance.
    Returns:
      Of the shape of `x`; every position has a value.
    Reference: as of `whiten`.
    Example:
      >>> whitened_by(jnp.array([2.0, 6.0]), mean=jnp.array(2.0), variance=jnp.array(4.0)).tolist()
      [0.0, 2.0]
    """
    whitened = (x - mean) * jax.lax.rsqrt(variance + epsilon)
    return whitened if shift_mean else whitened + mean
