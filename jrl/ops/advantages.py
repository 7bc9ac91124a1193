# SPDX-License-Identifier: Apache-2.0
"""Advantages of completions that have one score each, against the other samples of the same prompt.

With μ and σ over the V valid rows of a group:

| | A_i | weight of a prompt solved with probability p, K samples, 0/1 scores |
|---|---|---|
| `group_relative_advantages` | r_i − μ | (K−1)/K, whatever p |
| the same, `scale="group"` | (r_i − μ)/(σ + ε) | → 1/√(p(1−p)): very easy and very hard prompts count more |
| `leave_one_out_advantages` | r_i − mean of the others | 1: unbiased |
| `mean_scaled_advantages` | (r_i − μ)/μ | (1 − (1−p)^(K−1))/p: hard prompts count more |
| `length_weighted_advantages` | r_i − Σ n_j r_j/Σ n_j | (K−1)/K at equal lengths |

What holds of all: invalid rows (padding, a failed reward) enter no statistic and get 0; a group whose scores are all
equal, or that has a single valid row, gets exactly 0, but for `mean_scaled_advantages` of a single row. A score that is
NaN is that of a failed reward. float32 or better; no gradient flows through.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jrl.ops.checks import check_batch, check_float, check_mask, check_same_shape
from jrl.ops.groups import GroupStatistics, group_statistics, sum_of_group
from jrl.ops.masking import masked_mean, masked_variance, whiten, zero_masked
from jrl.ops.z_scores import z_scores


def group_relative_advantages(
    scores: Float[Array, "N"],
    groups: Int[Array, "N"],
    valid: Bool[Array, "N"],
    *,
    scale: str = "none",
    ddof: int = 0,
    epsilon: float = 1e-6,
) -> Float[Array, "N"]:
    """GRPO's: (r − μ)/(σ + ε) of the group; Dr. GRPO's without a scale: r − μ.

    Args:
      scores: One a completion.
      groups: Equal numbers are samples of one prompt.
      valid: False on padding.
      scale: "group": σ of the group. "batch": σ of the raw scores of all rows. "none": nothing divides.
      ddof: Of σ. 0 here; 1, which TRL and verl take, makes A smaller by √(1 − 1/K): 29 % at K = 2, 6 % at K = 8.
      epsilon: ε, outside the root; TRL's is 1e-4.
    Returns:
      One a completion: in units of the score, and without unit under a scale; 0 on invalid rows.
    Raises:
      ValueError: On another scale.
    Reference: Shao et al. 2024, arXiv:2402.03300, section 4.1.2; without scale: Liu et al. 2025, arXiv:2503.20783.
    Example:
      >>> scores, groups = jnp.array([1.0, 0.0, 0.1, 0.1]), jnp.array([4, 4, 7, 7])
      >>> group_relative_advantages(scores, groups, jnp.ones(4, bool)).tolist()
      [0.5, -0.5, 0.0, 0.0]
    """
    if scale not in _DEVIATIONS:
        raise ValueError(f"`scale` must be 'group', 'batch' or 'none', got {scale!r}.")
    valid, stats = _statistics(scores, groups, valid, ddof)
    deviation = _DEVIATIONS[scale]
    if deviation is None:
        return jax.lax.stop_gradient(_centred(scores, valid, stats))
    std = deviation(scores, valid, stats, ddof)
    found = z_scores(zero_masked(scores, valid), mean=stats.mean, std=std, epsilon=epsilon)
    return jax.lax.stop_gradient(jnp.where(valid & stats.is_mixed, found, 0.0))


def _group_deviation(scores: Array, valid: Array, stats: GroupStatistics, ddof: int) -> Float[Array, "N"]:
    """σ of each row's group; 1 where the group has no spread."""
    del scores, valid, ddof
    return jnp.where(stats.is_mixed, stats.std, 1.0)


def _batch_deviation(scores: Array, valid: Array, stats: GroupStatistics, ddof: int) -> Float[Array, ""]:
    """σ of the raw scores of all rows; 1 without any spread."""
    del stats
    std = jnp.sqrt(masked_variance(scores, valid, ddof=ddof))
    return jnp.where(std > 0, std, 1.0)


_DEVIATIONS: Mapping[str, Callable[[Array, Array, GroupStatistics, int], Array] | None] = {
    "group": _group_deviation,
    "batch": _batch_deviation,
    "none": None,
}


def leave_one_out_advantages(
    scores: Float[Array, "N"], groups: Int[Array, "N"], valid: Bool[Array, "N"]
) -> Float[Array, "N"]:
    """RLOO's: the score minus the mean of the group's other scores, = V/(V−1)·(r − μ).

    Args:
      scores: One a completion; NaN where the reward failed.
      groups: Equal numbers are samples of one prompt.
      valid: False on padding.
    Returns:
      One a completion, in units of the score; 0 on invalid rows.
    Reference: Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free!"; Ahmadian et al. 2024,
    arXiv:2402.14740, eq. 6.
    Example:
      >>> scores = jnp.array([1.0, 0.0, 0.5])
      >>> leave_one_out_advantages(scores, jnp.zeros(3, int), jnp.ones(3, bool)).tolist()
      [0.75, -0.75, 0.0]
    """
    valid, stats = _statistics(scores, groups, valid, 0)
    others = jnp.maximum(stats.size - 1.0, 1.0)
    return jax.lax.stop_gradient(_centred(scores, valid, stats) * (stats.size / others))


def mean_scaled_advantages(
    scores: Float[Array, "N"], groups: Int[Array, "N"], valid: Bool[Array, "N"]
) -> Float[Array, "N"]:
    """MaxRL's: (r − μ)/μ, and 0 throughout a group whose mean is not positive. A group of one keeps its score.

    For scores of 0 and 1; with negative ones the sign of μ would turn the gradient around.

    Args:
      scores: One a completion; NaN where the reward failed.
      groups: Equal numbers are samples of one prompt.
      valid: False on padding.
    Returns:
      One a completion, without unit, at least −1 for scores >= 0; 0 on invalid rows.
    Reference: Tajwar, Zeng et al. 2026, arXiv:2602.02710.
    Example:
      >>> scores = jnp.array([1.0, 0.0, 0.0, 0.0])
      >>> mean_scaled_advantages(scores, jnp.zeros(4, int), jnp.ones(4, bool)).tolist()
      [3.0, -1.0, -1.0, -1.0]
    """
    valid, stats = _statistics(scores, groups, valid, 0)
    has_mean = stats.mean > 0
    scaled = _centred(scores, valid, stats) / jnp.where(has_mean, stats.mean, 1.0)
    scaled = jnp.where(has_mean, scaled, 0.0)
    return jax.lax.stop_gradient(jnp.where(stats.size == 1, zero_masked(scores, valid), scaled))


def length_weighted_advantages(
    scores: Float[Array, "N"],
    lengths: Float[Array, "N"],
    groups: Int[Array, "N"],
    valid: Bool[Array, "N"],
) -> Float[Array, "N"]:
    """OPO's: the score minus the group's mean of scores, each weighed by its completion's number of actions.

    The row's own score is in the mean, so the estimator is biased as r − μ is.

    Args:
      scores: One a completion; NaN where the reward failed.
      lengths: Number of actions of each completion.
      groups: Equal numbers are samples of one prompt.
      valid: False on padding.
    Returns:
      One a completion, in units of the score; 0 on invalid rows.
    Reference: Hao et al. 2025, arXiv:2505.23585 (OPO), eq. 8.
    Example:
      >>> scores, lengths = jnp.array([1.0, 0.0]), jnp.array([1.0, 3.0])
      >>> length_weighted_advantages(scores, lengths, jnp.zeros(2, int), jnp.ones(2, bool)).tolist()
      [0.75, -0.25]
    """
    check_batch(valid, name="valid", lengths=lengths)
    valid, stats = _statistics(scores, groups, valid, 0)
    lengths = zero_masked(lengths, valid)
    scores = zero_masked(scores, valid)
    baseline = sum_of_group(lengths * scores, groups) / jnp.maximum(sum_of_group(lengths, groups), 1.0)
    return jax.lax.stop_gradient(jnp.where(valid & stats.is_mixed, scores - baseline, 0.0))


def decoupled_advantages(
    scores: Float[Array, "N F"],
    weights: Float[Array, "F"],
    groups: Int[Array, "N"],
    valid: Bool[Array, "N"],
    *,
    ddof: int = 0,
    epsilon: float = 1e-6,
) -> Float[Array, "N"]:
    """GDPO's: every reward function is normalised within its group first, then the weighted sum over the batch.

        Z_f = (r_f − μ_f)/(σ_f + ε),   s = Σ_f w_f·Z_f,   A = (s − mean s)/(std s + ε)

    Summed first, (1, 0) and (0, 1) of two functions would be one score.

    Args:
      scores: Of each reward function; NaN where one failed or does not apply: the others count.
      weights: w.
      groups: Equal numbers are samples of one prompt.
      valid: False on padding.
      ddof: Of both deviations.
      epsilon: ε of both.
    Returns:
      One a completion, without unit, of mean 0 over the valid rows but for rounding; 0 on the others.
    Reference: Liu et al. 2026, arXiv:2601.05242 (GDPO), section 3.
    Example:
      >>> scores = jnp.array([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
      >>> given = jnp.ones(2), jnp.zeros(3, int), jnp.ones(3, bool)
      >>> [round(float(a), 3) for a in decoupled_advantages(scores, *given)]
      [0.0, 0.0, 0.0]
    """
    _check_functions(scores, weights)
    check_mask(valid, name="valid")
    check_same_shape("valid", valid, "scores[:, 0]", scores[:, 0])
    known = valid[:, None] & ~jnp.isnan(scores)
    normalised = jnp.stack(
        [
            group_relative_advantages(
                scores[:, f], groups, known[:, f], scale="group", ddof=ddof, epsilon=epsilon
            )
            for f in range(scores.shape[1])
        ],
        axis=1,
    )
    weighed = normalised * weights[None, :]
    total = jnp.sum(weighed, axis=1)
    # Functions that cancel each other leave rounding, which the second deviation would blow up to size 1.
    rounding = 32 * float(np.finfo(total.dtype).eps) * jnp.sum(jnp.abs(weighed), axis=1)
    total = jnp.where(jnp.abs(total) > rounding, total, 0.0)
    return standardized(total, jnp.any(known, axis=1), ddof=ddof, epsilon=epsilon)


def standardized(
    x: Float[Array, "*shape"], mask: Bool[Array, "*shape"], *, ddof: int = 0, epsilon: float = 1e-6
) -> Float[Array, "*shape"]:
    """(x − mean)/(std + ε) over the True positions of `mask`; exactly 0 where all of them are equal.

    Args:
      x: Values.
      mask: True where a value counts; elsewhere the result is 0.
      ddof: Of the deviation.
      epsilon: ε, outside the root.
    Returns:
      Of the shape of `x`, without unit, of mean 0 over the True positions but for rounding. No gradient flows through.
    Reference: none; the z-score.
    Example:
      >>> [round(float(x), 3) for x in standardized(jnp.array([1.0, 3.0]), jnp.ones(2, bool))]
      [-1.0, 1.0]
    """
    check_batch(mask, x=x)
    std = jnp.sqrt(masked_variance(x, mask, ddof=ddof))
    scores = z_scores(zero_masked(x, mask), mean=masked_mean(x, mask), std=std, epsilon=epsilon)
    return jax.lax.stop_gradient(jnp.where(mask & _has_spread(x, mask), scores, 0.0))


def whitened_over_batch(x: Float[Array, "N T"], mask: Bool[Array, "N T"]) -> Float[Array, "N T"]:
    """`whiten` over all actions with the variance of a population; exactly 0 where all of them are equal.

    Args:
      x: Advantages of the actions.
      mask: True on actions.
    Returns:
      Of the shape of `x`, without unit, 0 where `mask` is False. No gradient flows through.
    Reference: Hu et al. 2025, arXiv:2501.03262 (REINFORCE++), eq. 5.
    Example:
      >>> [round(float(x), 3) for x in whitened_over_batch(jnp.array([[1.0, 3.0]]), jnp.ones((1, 2), bool))[0]]
      [-1.0, 1.0]
    """
    check_batch(mask, x=x)
    return jnp.where(_has_spread(x, mask), whiten(x, mask, ddof=0), 0.0)


def _check_functions(scores: Array, weights: Array) -> None:
    """Refuses scores and weights that are not of the same reward functions."""
    check_float("scores", scores)
    check_float("weights", weights)
    if scores.shape[1:] != weights.shape:
        raise ValueError(
            f"`weights` must have shape {scores.shape[1:]}, one of each column of `scores`, got {weights.shape}."
        )


def _has_spread(x: Array, mask: Array) -> Bool[Array, ""]:
    high = jnp.max(x, where=mask, initial=-jnp.inf)
    return high > jnp.min(x, where=mask, initial=jnp.inf)


def _statistics(
    scores: Array, groups: Array, valid: Array, ddof: int
) -> tuple[Bool[Array, "N"], GroupStatistics]:
    """Valid rows without those whose reward failed, and the statistics over them."""
    check_batch(valid, name="valid", scores=scores)
    check_same_shape("groups", groups, "valid", valid)
    valid = valid & ~jnp.isnan(scores)
    return valid, group_statistics(scores, groups, valid, ddof=ddof)


def _centred(scores: Array, valid: Array, stats: GroupStatistics) -> Float[Array, "N"]:
    """r − μ; exactly 0 in a group without spread, where rounding of the mean would be all that is left."""
    return jnp.where(valid & stats.is_mixed, zero_masked(scores, valid) - stats.mean, 0.0)
