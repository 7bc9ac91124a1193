# SPDX-License-Identifier: Apache-2.0
"""Metrics as sums with weights, so that averages over microbatches, minibatches and devices are exact.

A metric is a `Mean`, a `Max` or a `Min` until `finalize` turns it into a number on the host. What nothing contributed
to has weight 0 and is left out of the record: it is unknown, not zero.

Reference: none; sums and weights.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Shaped

from jrl.ops.checks import check_mask, check_same_shape
from jrl.ops.masking import at_least_float32, masked_sum
from jrl.typing import Kept, Max, Mean, Metrics, Min

_Metric = Mean | Max | Min | Kept


def mean_metric(x: Shaped[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Mean:
    """Mean of `x` (numbers, or claims as 0/1) over the True positions of `mask`.

    Args:
      x: Numbers, or claims as 0/1.
      mask: True where one counts.
    Returns:
      Sum and number of those that count.
    Example:
      >>> metric = mean_metric(jnp.array([1.0, 3.0, 9.0]), jnp.array([True, True, False]))
      >>> float(metric.total), float(metric.weight)
      (4.0, 2.0)
    """
    total = masked_sum(x, mask)
    return Mean(total, jnp.sum(mask, dtype=total.dtype))


def max_metric(x: Shaped[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Max:
    """Maximum of `x` over the True positions of `mask`; −inf, which every merge ignores, if there is none.

    Args:
      x: Numbers.
      mask: True where one counts.
    Returns:
      A metric whose `value` is a scalar.
    Example:
      >>> float(max_metric(jnp.array([1.0, 3.0, 9.0]), jnp.array([True, True, False])).value)
      3.0
    """
    check_mask(mask)
    check_same_shape("x", x, "mask", mask)
    return Max(jnp.max(at_least_float32(x), where=mask, initial=-jnp.inf))


def min_metric(x: Shaped[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Min:
    """Minimum of `x` over the True positions of `mask`; +inf, which every merge ignores, if there is none.

    Args:
      x: Numbers.
      mask: True where one counts.
    Returns:
      A metric whose `value` is a scalar.
    Example:
      >>> float(min_metric(jnp.array([2.0, 3.0, 1.0]), jnp.array([True, True, False])).value)
      2.0
    """
    return Min(-max_metric(-x, mask).value)


def merge_metrics(first: Metrics, second: Metrics) -> Metrics:
    """Merges two sets; a name that stands in both is averaged by weight, maximised or minimised.

    Args:
      first: Metrics by name.
      second: Metrics by name.
    Returns:
      All names of both.
    Raises:
      TypeError: If one name is a mean here and a maximum or minimum there.
    Example:
      >>> mask = jnp.ones(2, bool)
      >>> first, second = mean_metric(jnp.array([1.0, 2.0]), mask), mean_metric(jnp.array([6.0, 7.0]), mask)
      >>> finalize(merge_metrics({"loss": first}, {"loss": second}))
      {'loss': 4.0}
    """
    merged = {**first, **second}
    for name in first.keys() & second.keys():
        merged[name] = _merge(name, first[name], second[name])
    return merged


def _merge(name: str, first: _Metric, second: _Metric) -> _Metric:
    if isinstance(first, Mean) and isinstance(second, Mean):
        return Mean(first.total + second.total, first.weight + second.weight)
    if isinstance(first, Max) and isinstance(second, Max):
        return Max(jnp.maximum(first.value, second.value))
    if isinstance(first, Min) and isinstance(second, Min):
        return Min(jnp.minimum(first.value, second.value))
    raise TypeError(
        f"metric {name!r} must be of one kind, got {type(first).__name__} and {type(second).__name__}."
    )


def reduce_metrics(stacked: Metrics) -> Metrics:
    """Merges metrics along their leading axis, as `jax.lax.scan` returns them.

    Args:
      stacked: Metrics whose arrays have one more axis in front.
    Returns:
      The same names, without the leading axis.
    Example:
      >>> finalize(reduce_metrics({"loss": Mean(jnp.array([1.0, 5.0]), jnp.array([1.0, 2.0]))}))
      {'loss': 2.0}
    """

    def reduced(metric: _Metric) -> _Metric:
        if isinstance(metric, Kept):
            return Kept(jnp.concatenate(metric.rows))
        if isinstance(metric, Mean):
            return Mean(jnp.sum(metric.total, axis=0), jnp.sum(metric.weight, axis=0))
        if isinstance(metric, Max):
            return Max(jnp.max(metric.value, axis=0))
        return Min(jnp.min(metric.value, axis=0))

    return {name: reduced(metric) for name, metric in stacked.items()}


def no_metrics(shapes: Metrics) -> Metrics:
    """Metrics of these shapes that add nothing to any they are merged with; of kept rows, −1.

    Args:
      shapes: Metrics of arrays, or of `jax.ShapeDtypeStruct`.
    Returns:
      The same names, arrays and dtypes.
    Example:
      >>> metrics = {"loss": mean_metric(jnp.array([1.5]), jnp.ones(1, bool))}
      >>> finalize(merge_metrics(metrics, no_metrics(metrics)))
      {'loss': 1.5}
    """
    fills = {Mean: 0.0, Max: -math.inf, Min: math.inf, Kept: -1.0}

    def nothing(metric: _Metric) -> _Metric:
        filled: _Metric = jax.tree.map(lambda x: jnp.full(x.shape, fills[type(metric)], x.dtype), metric)
        return filled

    return {name: nothing(metric) for name, metric in shapes.items()}


def finalize(metrics: Metrics) -> dict[str, float]:
    """Turns metrics into the numbers to log, on the host: waits for the device.

    Args:
      metrics: Metrics by name.
    Returns:
      Total over weight, the maximum or the minimum. Names to which nothing contributed are missing, and rows that were
      kept; NaN stays NaN.
    Example:
      >>> mask = jnp.array([True, True, False])
      >>> finalize({"a": mean_metric(jnp.array([1.0, 2.0, 9.0]), mask), "b": mean_metric(mask, ~mask & mask)})
      {'a': 1.5}
    """
    numbers: dict[str, float] = {}
    logged = {name: metric for name, metric in metrics.items() if not isinstance(metric, Kept)}
    for name, metric in jax.device_get(logged).items():
        if not isinstance(metric, Mean):
            nothing = -math.inf if isinstance(metric, Max) else math.inf
            if metric.value != nothing:
                numbers[name] = float(metric.value)
        elif metric.weight != 0:
            numbers[name] = float(metric.total / metric.weight)
    return numbers
