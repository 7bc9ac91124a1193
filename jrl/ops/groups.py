# SPDX-License-Identifier: Apache-2.0
"""Statistics over the samples of one prompt, wherever their rows lie.

A group is known by a number that its rows share; which numbers they are, and in which order the rows come, is
irrelevant. Sums run over all rows of all devices, so a group may be split over them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jrl.ops.checks import check_batch, check_float, check_integer, check_same_shape
from jrl.ops.masking import zero_masked


class GroupStatistics(NamedTuple):
    """Statistics of the group of each row, over its valid rows.

    Attributes:
      mean: Their mean; 0 where there is none.
      std: Their deviation; 0 where all are equal, and where there are too few for the `ddof`.
      size: Their number.
      is_mixed: Whether two of them differ. Decided by largest and smallest, not by the deviation: that of equal
        numbers is what rounding left over, and noise once it divides.
    """

    mean: Float[Array, "N"]
    std: Float[Array, "N"]
    size: Float[Array, "N"]
    is_mixed: Bool[Array, "N"]


def group_numbers(groups: Int[Array, "N"]) -> Int[Array, "N"]:
    """Numbers of groups counted from 0: equal ones stay equal, whatever they were.

    Args:
      groups: Equal numbers are samples of one prompt.
    Returns:
      In [0, number of groups), in the order of the original numbers.
    Reference: none; an index of distinct numbers.
    Example:
      >>> group_numbers(jnp.array([9, -5, 9])).tolist()
      [1, 0, 1]
    """
    check_integer("groups", groups)
    _, numbers = jnp.unique(groups, return_inverse=True, size=groups.shape[0])
    return jnp.reshape(numbers, groups.shape)


def sum_of_group(x: Float[Array, "N"], groups: Int[Array, "N"]) -> Float[Array, "N"]:
    """For each row, the sum of `x` over the rows of its group.

    Args:
      x: One number a row.
      groups: Equal numbers are samples of one prompt.
    Returns:
      The same at all rows of a group.
    Reference: none; a sum by key.
    Example:
      >>> sum_of_group(jnp.array([1.0, 2.0, 4.0]), jnp.array([9, 5, 9])).tolist()
      [5.0, 2.0, 5.0]
    """
    check_float("x", x)
    check_same_shape("x", x, "groups", groups)
    numbers = group_numbers(groups)
    return jax.ops.segment_sum(x, numbers, num_segments=x.shape[0])[numbers]


def group_statistics(
    scores: Float[Array, "N"], groups: Int[Array, "N"], valid: Bool[Array, "N"], *, ddof: int = 0
) -> GroupStatistics:
    """Mean, deviation and number of the valid scores of each row's group.

    Args:
      scores: One a completion. What stands at invalid rows is irrelevant, NaN included.
      groups: Equal numbers are samples of one prompt.
      valid: False on padding and on rows whose reward failed.
      ddof: Subtracted from the count in the variance's denominator.
    Returns:
      The same at all rows of a group, in units of the score; 0 where a group has no valid row.
    Reference: none; moments of a population, or of a sample under `ddof` 1.
    Example:
      >>> found = group_statistics(jnp.array([1.0, 3.0, 9.0]), jnp.array([4, 4, 7]), jnp.array([True, True, False]))
      >>> found.mean.tolist(), found.std.tolist(), found.size.tolist()
      ([2.0, 2.0, 0.0], [1.0, 1.0, 0.0], [2.0, 2.0, 0.0])
    """
    check_batch(valid, name="valid", scores=scores)
    check_same_shape("groups", groups, "valid", valid)
    numbers = group_numbers(groups)

    def over_group(x: Float[Array, "N"]) -> Float[Array, "N"]:
        return jax.ops.segment_sum(x, numbers, num_segments=x.shape[0])[numbers]

    scores = zero_masked(scores, valid)
    count = over_group(valid.astype(scores.dtype))
    mean = over_group(scores) / jnp.maximum(count, 1.0)
    deviations = zero_masked(scores - mean, valid)
    variance = over_group(jnp.square(deviations)) / jnp.maximum(count - ddof, 1.0)
    high = jax.ops.segment_max(jnp.where(valid, scores, -jnp.inf), numbers, num_segments=scores.shape[0])
    low = jax.ops.segment_min(jnp.where(valid, scores, jnp.inf), numbers, num_segments=scores.shape[0])
    is_mixed = (high > low)[numbers]
    std = jnp.where(is_mixed & (count > ddof), jnp.sqrt(jnp.where(is_mixed, variance, 1.0)), 0.0)
    return GroupStatistics(mean, std, count, is_mixed)


def smallest_of_group(
    x: Float[Array, "N"], groups: Int[Array, "N"], valid: Bool[Array, "N"], *, num_kept: int
) -> Bool[Array, "N"]:
    """True on the `num_kept` valid rows of each group with the smallest `x`; ties go to the row that comes first.

    The shortest completions with their lengths as `x`, those of the best reward a token with minus that.

    Args:
      x: What is compared.
      groups: Equal numbers are samples of one prompt.
      valid: Rows that may be kept.
      num_kept: At least 1.
    Returns:
      At most `num_kept` True in each group; False on invalid rows.
    Raises:
      ValueError: If `num_kept` is below 1.
    Reference: Shrivastava et al. 2025, arXiv:2508.09726 (GFPO), algorithm 1.
    Example:
      >>> lengths, groups = jnp.array([3.0, 1.0, 2.0, 5.0]), jnp.array([0, 0, 0, 1])
      >>> smallest_of_group(lengths, groups, jnp.ones(4, bool), num_kept=1).tolist()
      [False, True, False, True]
    """
    if num_kept < 1:
        raise ValueError(f"`num_kept` must be at least 1, got {num_kept}.")
    check_batch(valid, name="valid", x=x)
    check_same_shape("groups", groups, "valid", valid)
    numbers, num_rows = group_numbers(groups), x.shape[0]
    # lexsort is stable, and its last key leads: by group, valid rows first, then by x.
    order = jnp.lexsort((zero_masked(x, valid), ~valid, numbers))
    sizes = jax.ops.segment_sum(jnp.ones(num_rows, jnp.int32), numbers, num_segments=num_rows)
    first = jnp.cumsum(sizes) - sizes
    rank = jnp.zeros(num_rows, jnp.int32).at[order].set(jnp.arange(num_rows, dtype=jnp.int32))
    return valid & (rank - first[numbers] < num_kept)
