# SPDX-License-Identifier: Apache-2.0
"""Credit assignment, from rewards to the targets of learning: clip → scale → clip → KL penalty → advantages.

All of it happens once an iteration, over all rollouts at once, before the first optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jrl.ops.kl import kl_k1, kl_k2
from jrl.ops.masking import masked_sum, masked_variance, whiten, zero_masked
from jrl.ops.metrics import mean_metric
from jrl.ops.moments import RunningMoments, init_moments, moments_std, update_moments
from jrl.ops.returns import gae
from jrl.ops.rewards import clip_scores, place_scores
from jrl.typing import Mean, Metrics, Rollouts, Scored


class Credit(NamedTuple):
    """Advantages and returns of the actions.

    Attributes:
      advantages: As the loss reads them; 0 at mask 0.
      returns: As the values are trained towards; None without a critic.
    """

    advantages: Float[Array, "N T"]
    returns: Float[Array, "N T"] | None


Estimate = Callable[
    [Float[Array, "N T"], Float[Array, "N T"] | None, Bool[Array, "N T"], Int[Array, "N"] | None], Credit
]
"""(rewards, old values, mask, groups) → credit. Rewards hold the KL penalty; all rollouts come at once."""
Penalize = Callable[[Float[Array, "N T"], Scored, Bool[Array, "N T"], Float[Array, ""]], Float[Array, "N T"]]
"""(rewards, scored, mask, kl_coef) → rewards that hold the KL penalty; 0 at mask 0."""


class ScoreMoments(NamedTuple):
    """State of the score scaling.

    Attributes:
      running: Moments of all scores so far, after clipping and before scaling.
      ref_std: Standard deviation of the reference scores; 0 until it is known.
    """

    running: RunningMoments
    ref_std: Float[Array, ""]


class ScoreDeviation(NamedTuple):
    """A deviation that rewards are divided by.

    Attributes:
      of: Of the moments so far.
      has_mean: Whether a mean belongs to it that may be subtracted first.
    """

    of: Callable[[ScoreMoments], Float[Array, ""]]
    has_mean: bool


SCORE_DEVIATIONS: Mapping[str | bool | None, ScoreDeviation] = {
    "running": ScoreDeviation(lambda moments: moments_std(moments.running), has_mean=True),
    "ref": ScoreDeviation(lambda moments: moments.ref_std, has_mean=False),
}
"""Deviations by the names of PPO's `scale_reward`."""


class Scaling(NamedTuple):
    """Clipping and scaling of the user's rewards, before anything else is done to them.

    Attributes:
      clip_range: Rewards are clipped to ± this, token by token; None, False and 0 are off.
      mode: A name of `SCORE_DEVIATIONS`: "running" divides by the running deviation, this batch included; "ref" by that
        of the reference scores, which are the first batch's unless configured. Anything else leaves the rewards. Where
        scores do not vary, the deviation counts as 1.
      center: Under "running", whether their running mean is subtracted first, from the last action of each row.
      scaled_clip_range: What comes out is clipped to ± this, token by token; None is off.
      ref_std: Of the reference scores; None: the first batch's.
    """

    clip_range: float | bool | None = None
    mode: str | bool | None = None
    center: bool = False
    scaled_clip_range: float | None = None
    ref_std: float | None = None

    def init(self) -> ScoreMoments:
        """Moments before the first score."""
        return ScoreMoments(init_moments(), jnp.float32(0.0 if self.ref_std is None else self.ref_std))

    def __call__(
        self, rewards: Float[Array, "N T"], mask: Bool[Array, "N T"], moments: ScoreMoments
    ) -> tuple[Float[Array, "N T"], ScoreMoments]:
        """Clips the rewards, takes their row totals into the moments, and divides by a deviation if asked.

        Args:
          rewards: The user's, per token.
          mask: True on actions; a row without any is not a rollout and does not count.
          moments: From the iterations before.
        Returns:
          Rewards and the moments after them; moments that are not finite are not taken over.
        """
        if self.clip_range:
            rewards = clip_scores(rewards, clip_range=self.clip_range)
        totals, real = masked_sum(rewards, mask, axis=1), jnp.any(mask, axis=1)
        running, _, _ = update_moments(moments.running, totals, real)
        batch, _, _ = update_moments(init_moments(), totals, real)
        updated = ScoreMoments(running, jnp.where(moments.ref_std > 0, moments.ref_std, moments_std(batch)))
        # One score that is not finite would stay in the running moments for good.
        sound = jnp.isfinite(running.mean) & jnp.isfinite(running.variance)
        updated = jax.tree.map(lambda new, old: jnp.where(sound, new, old), updated, moments)
        deviation = SCORE_DEVIATIONS.get(self.mode)
        if deviation is not None:
            if self.center and deviation.has_mean:
                mean = jnp.full(rewards.shape[:1], updated.running.mean)
                rewards = rewards - place_scores(mean, mask)
            rewards = rewards / deviation.of(updated)
        if self.scaled_clip_range is not None:
            rewards = clip_scores(rewards, clip_range=self.scaled_clip_range)
        return rewards, updated


def _reference(scored: Scored) -> Float[Array, "N T"]:
    if scored.ref_logprobs is None:
        raise ValueError(
            "`scored.ref_logprobs` must be there for a KL penalty, got None: make the scoring pass with a reference."
        )
    return scored.ref_logprobs


def _full_kl(scored: Scored) -> Float[Array, "N T"]:
    if scored.full_kl is None:
        raise ValueError(
            '`scored.full_kl` must be there for `kl_penalty` "full", got None: make the scoring pass with '
            "`with_full_kl`."
        )
    return scored.full_kl


KL_PENALTIES: Mapping[str, Callable[[Scored], Float[Array, "N T"]]] = {
    "kl": lambda scored: kl_k1(scored.logprobs, _reference(scored)),
    "abs": lambda scored: jnp.abs(kl_k1(scored.logprobs, _reference(scored))),
    "mse": lambda scored: kl_k2(scored.logprobs, _reference(scored)),
    "full": _full_kl,
}
"""Distance of the policy from its reference at each action, in nats but for "mse", by the penalty's name."""


def unpenalized(
    rewards: Float[Array, "N T"], scored: Scored, mask: Bool[Array, "N T"], kl_coef: Float[Array, ""]
) -> Float[Array, "N T"]:
    """Rewards as they are, 0 where `mask` is False: for algorithms without a KL penalty in the rewards."""
    del scored, kl_coef
    return zero_masked(rewards, mask)


def penalize(kl_penalty: str) -> Penalize:
    """Rewards minus the weighed KL penalty, token by token.

    Args:
      kl_penalty: A name of `KL_PENALTIES`.
    """

    def penalized(
        rewards: Float[Array, "N T"], scored: Scored, mask: Bool[Array, "N T"], kl_coef: Float[Array, ""]
    ) -> Float[Array, "N T"]:
        return zero_masked(rewards, mask) - kl_coef * zero_masked(KL_PENALTIES[kl_penalty](scored), mask)

    return penalized


def generalized_advantages(*, gamma: float, gae_lambda: float, whiten_rewards: bool = False) -> Estimate:
    """Advantages by GAE, whitened over the whole batch; returns, which are the raw ones plus the values.

    Args:
      gamma: Discount per token.
      gae_lambda: λ.
      whiten_rewards: Whether rewards are scaled to unit variance over the batch; their mean stays.
    """

    def estimate(
        rewards: Float[Array, "N T"],
        values: Float[Array, "N T"] | None,
        mask: Bool[Array, "N T"],
        groups: Int[Array, "N"] | None,
    ) -> Credit:
        del groups
        if values is None:
            raise ValueError("`values` must be given to GAE, got None: give the recipe a critic.")
        if whiten_rewards:
            rewards = whiten(rewards, mask, shift_mean=False)
        advantages = gae(rewards, values, mask, gamma=gamma, gae_lambda=gae_lambda)
        # From the raw advantages: whitened ones would train the critic on noise.
        return Credit(whiten(advantages, mask), jnp.where(mask, advantages + values, 0.0))

    return estimate


def returns_to_go(*, gamma: float = 1.0, baseline: float = 0.0) -> Estimate:
    """Monte-Carlo returns of each action minus a constant: REINFORCE without a critic.

        A_t = Σ_{s ≥ t} γ^(s−t)·r_s − b

    Args:
      gamma: Discount per token.
      baseline: b, in units of the reward.
    Reference: Williams 1992, "Simple statistical gradient-following algorithms", eq. 4.
    """

    def estimate(
        rewards: Float[Array, "N T"],
        values: Float[Array, "N T"] | None,
        mask: Bool[Array, "N T"],
        groups: Int[Array, "N"] | None,
    ) -> Credit:
        del values, groups
        # λ = 1 and no values: what is left of GAE is the return.
        returns = gae(rewards, jnp.zeros_like(rewards), mask, gamma=gamma, gae_lambda=1.0)
        return Credit(zero_masked(returns - baseline, mask), None)

    return estimate


def kl_per_sequence(rollouts: Rollouts, kl_penalty: str = "kl") -> Mean:
    """Mean over rollouts of the penalty's sum over actions (of k1, in nats): what the controller steers."""
    mask = rollouts.sequences.mask
    kl = KL_PENALTIES[kl_penalty](rollouts.scored)
    return mean_metric(masked_sum(kl, mask, axis=1), jnp.any(mask, axis=1))


def rollout_metrics(
    rollouts: Rollouts,
    credit: Credit,
    *,
    kl_penalty: str | None,
    prefix: str,
    learned: Bool[Array, "N T"] | None = None,
) -> Metrics:
    """Metrics of the rollouts before any training on them. Rewards are neither clipped nor scaled.

    Args:
      rollouts: All of the iteration, those that an algorithm leaves out included.
      credit: What is learned from them.
      kl_penalty: A name of `KL_PENALTIES`; None: there is no reference.
      prefix: Of the critic's metrics.
      learned: True on the actions that have credit; None: all have.
    """
    mask, scored = rollouts.sequences.mask, rollouts.scored
    real = jnp.any(mask, axis=1)
    totals = masked_sum(rollouts.rewards, mask, axis=1)
    found: Metrics = {
        "reward/mean": mean_metric(totals, real),
        "reward/std": Mean(jnp.sqrt(masked_variance(totals, real)), jnp.float32(1)),
        "completion/length_mean": mean_metric(jnp.sum(mask, axis=1, dtype=jnp.float32), real),
    }
    if kl_penalty is not None:
        found["kl/per_token"] = mean_metric(KL_PENALTIES[kl_penalty](scored), mask)
        found["kl/per_sequence"] = kl_per_sequence(rollouts, kl_penalty)
    if credit.returns is not None and scored.values is not None:
        with_credit = mask if learned is None else learned
        spread = masked_variance(credit.returns, with_credit)
        unexplained = masked_variance(credit.returns - scored.values, with_credit)
        known = spread > 0
        explained = jnp.where(known, 1 - unexplained / jnp.where(known, spread, 1.0), 0.0)
        found[f"{prefix}/explained_variance"] = Mean(explained, known.astype(jnp.float32))
    return found
