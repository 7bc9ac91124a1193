# SPDX-License-Identifier: Apache-2.0
"""Credit by groups of samples of one prompt, and the rollouts that an update leaves out."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jrl.learners.credit import Credit, Estimate
from jrl.losses.policy_gradient import Targets
from jrl.ops.advantages import decoupled_advantages, whitened_over_batch
from jrl.ops.groups import smallest_of_group
from jrl.ops.masking import masked_sum, zero_masked
from jrl.ops.metrics import max_metric, mean_metric
from jrl.ops.sampler_correction import effective_sample_size
from jrl.typing import Mean, Metrics, Rollouts

ScoreAdvantages = Callable[
    [Float[Array, "N"], Float[Array, "N"], Int[Array, "N"], Bool[Array, "N"]], Float[Array, "N"]
]
"""(scores, lengths, groups, valid) → one advantage a completion; see `jrl.ops.advantages`."""


def group_credit(advantages: ScoreAdvantages, *, whitened: bool = False) -> Estimate:
    """Builds an estimator: an advantage for each completion, from its score and those of its prompt's others.

    The score is the sum of the row's rewards, a KL penalty in them included.

    Args:
      advantages: Of the scores.
      whitened: Whether they are whitened over all actions afterwards (REINFORCE++-baseline), long rows counting more.
    """

    def estimate(
        rewards: Float[Array, "N T"],
        values: Float[Array, "N T"] | None,
        mask: Bool[Array, "N T"],
        groups: Int[Array, "N"] | None,
    ) -> Credit:
        del values
        if groups is None:
            raise ValueError(
                "`groups` of the rollouts must hold the prompt of each row, got None: this algorithm compares the "
                "samples of one prompt."
            )
        lengths = jnp.sum(mask, axis=1, dtype=rewards.dtype)
        per_row = advantages(masked_sum(rewards, mask, axis=1), lengths, groups, jnp.any(mask, axis=1))
        spread = zero_masked(jnp.broadcast_to(per_row[:, None], mask.shape), mask)
        return Credit(whitened_over_batch(spread, mask) if whitened else spread, None)

    return estimate


def as_they_are() -> Estimate:
    """Builds an estimator for scores that are advantages already: each action gets that of its completion."""
    return group_credit(lambda scores, lengths, groups, valid: zero_masked(scores, valid))


def decoupled_scores(
    weights: tuple[float, ...] | None = None, *, ddof: int = 0, epsilon: float = 1e-6
) -> Callable[
    [Float[Array, "N F"], Int[Array, "N"], Bool[Array, "N"]],
    Float[Array, "N"],
]:
    """GDPO's advantages for the `aggregate` of a recipe; see `jrl.ops.decoupled_advantages`.

    Args:
      weights: Of the reward functions; None: 1 each.
      ddof: Of the deviations.
      epsilon: Behind them.
    """

    def aggregate(
        scores: Float[Array, "N F"], groups: Int[Array, "N"], valid: Bool[Array, "N"]
    ) -> Float[Array, "N"]:
        weighed = jnp.ones(scores.shape[1]) if weights is None else jnp.asarray(weights, scores.dtype)
        return decoupled_advantages(scores, weighed, groups, valid, ddof=ddof, epsilon=epsilon)

    return aggregate


def whitened_credit(estimate: Estimate) -> Estimate:
    """Another estimate's advantages, whitened over all actions with the variance of a population (REINFORCE++).

    Args:
      estimate: Whose advantages they are; its returns stay.
    """

    def whitened(
        rewards: Float[Array, "N T"],
        values: Float[Array, "N T"] | None,
        mask: Bool[Array, "N T"],
        groups: Int[Array, "N"] | None,
    ) -> Credit:
        credit = estimate(rewards, values, mask, groups)
        return credit._replace(advantages=whitened_over_batch(credit.advantages, mask))

    return whitened


class Selection(NamedTuple):
    """The rollouts that an update learns from: those that are left out have no action, and no denominator counts them.

    A row whose reward failed (NaN) is always left out, and so is one that the sampling rules do not keep.

    Attributes:
      num_kept: Rows kept of each group, those of the smallest length or the largest reward a token; None: all.
      by_efficiency: Whether the reward a token decides, and not the length.
      needs_sampler: Leaves out rows with an action whose log-probability the sampler did not report.
    """

    num_kept: int | None = None
    by_efficiency: bool = False
    needs_sampler: bool = False

    def __call__(self, rollouts: Rollouts) -> Rollouts:
        """Masks the actions of the rows that are not selected, and their rewards.

        Args:
          rollouts: All of the iteration.
        Raises:
          ValueError: If groups or the sampler's log-probabilities are needed and missing.
        """
        mask = rollouts.sequences.mask
        scores, keep = row_scores(rollouts), jnp.any(mask, axis=1)
        keep = keep & ~jnp.isnan(scores)
        if rollouts.kept is not None:
            keep = keep & rollouts.kept
        if self.needs_sampler:
            if rollouts.sampler_logprobs is None:
                raise ValueError(
                    "`sampler_logprobs` of the rollouts must be there for a correction, got None."
                )
            keep = keep & jnp.all(jnp.isfinite(rollouts.sampler_logprobs) | ~mask, axis=1)
        if self.num_kept is not None:
            if rollouts.groups is None:
                raise ValueError("`groups` of the rollouts must be there to choose within them, got None.")
            lengths = jnp.sum(mask, axis=1, dtype=scores.dtype)
            measure = -scores / jnp.maximum(lengths, 1.0) if self.by_efficiency else lengths
            keep = smallest_of_group(measure, rollouts.groups, keep, num_kept=self.num_kept)
        kept = mask & keep[:, None]
        return rollouts._replace(
            sequences=rollouts.sequences._replace(mask=kept), rewards=zero_masked(rollouts.rewards, kept)
        )


def row_scores(rollouts: Rollouts) -> Float[Array, "N"]:
    """Score of each completion: the sum of its rewards, NaN where its reward failed."""
    return masked_sum(rollouts.rewards, rollouts.sequences.mask, axis=1)


def selection_metrics(rollouts: Rollouts, kept: Rollouts) -> Metrics:
    """Share of the rollouts that the update learns from.

    Args:
      rollouts: All of the iteration.
      kept: Those that the update learns from.
    """
    real = jnp.any(rollouts.sequences.mask, axis=1)
    return {"rollout/kept_fraction": mean_metric(jnp.any(kept.sequences.mask, axis=1), real)}


def sampler_metrics(targets: Targets) -> Metrics:
    """Metrics of the correction for another sampler; {} where there is none.

    Args:
      targets: Of the iteration, with their weights.
    """
    if targets.weights is None:
        return {}
    mask, weights = targets.mask, targets.weights
    return {
        "sampler/ess": Mean(effective_sample_size(weights, mask), jnp.any(mask).astype(jnp.float32)),
        "sampler/weight_mean": mean_metric(weights, mask),
        "sampler/weight_max": max_metric(weights, mask),
        "sampler/dropped_fraction": mean_metric(weights == 0, mask),
    }
