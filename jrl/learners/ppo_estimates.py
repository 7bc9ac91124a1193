# SPDX-License-Identifier: Apache-2.0
"""From the scores of a set of rollouts to what PPO learns from: clip → scale → clip → KL penalty → GAE → whiten.

All of it happens once an iteration, over all rollouts at once, before the first optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jrl.learners.ppo_config import PPOConfig
from jrl.losses.ppo import PPOTargets
from jrl.ops.kl import kl_k1, kl_k2
from jrl.ops.masking import masked_sum, masked_variance, whiten, zero_masked
from jrl.ops.metrics import mean_metric
from jrl.ops.moments import RunningMoments, init_moments, moments_std, update_moments
from jrl.ops.returns import gae
from jrl.ops.rewards import clip_scores, place_scores
from jrl.typing import Mean, Metrics, PPOBatch, Scored


class ScoreMoments(NamedTuple):
    """What scaling the scores needs to remember.

    Attributes:
      running: Moments of all scores so far, after clipping and before scaling.
      ref_std: Standard deviation of the reference scores; 0 until it is known.
    """

    running: RunningMoments
    ref_std: Float[Array, ""]


def init_score_moments(ref_std: float | None) -> ScoreMoments:
    """Before the first score; `ref_std` is that of the reference scores where it is configured."""
    return ScoreMoments(init_moments(), jnp.float32(0.0 if ref_std is None else ref_std))


def scale_scores(
    scores: Float[Array, "N T"],
    mask: Bool[Array, "N T"],
    moments: ScoreMoments,
    *,
    clip_range: float | bool | None,
    mode: str | bool | None,
    center: bool = False,
    scaled_clip_range: float | None = None,
) -> tuple[Float[Array, "N T"], ScoreMoments]:
    """Clips the scores, takes their row totals into the moments, and divides by a deviation if asked.

    Args:
      scores: The user's rewards per token.
      mask: True on actions; a row without any is not a rollout and does not count.
      moments: From the iterations before.
      clip_range: Scores are clipped to ± this, token by token; None, False and 0 are off.
      mode: "running" divides by the running deviation, this batch included; "ref" by that of the reference
        scores, which are the first batch's unless configured. Anything else leaves the scores. Where scores do
        not vary, the deviation counts as 1.
      center: Under "running", whether their running mean is subtracted first, from the last action of each row.
      scaled_clip_range: What comes out is clipped to ± this, token by token; None is off.
    Returns:
      Scores and the moments after them; moments that are not finite are not taken over.
    """
    if clip_range:
        scores = clip_scores(scores, clip_range=clip_range)
    totals, real = masked_sum(scores, mask, axis=1), jnp.any(mask, axis=1)
    running, _, _ = update_moments(moments.running, totals, real)
    batch, _, _ = update_moments(init_moments(), totals, real)
    updated = ScoreMoments(running, jnp.where(moments.ref_std > 0, moments.ref_std, moments_std(batch)))
    # One score that is not finite would stay in the running moments for good.
    sound = jnp.isfinite(running.mean) & jnp.isfinite(running.variance)
    updated = jax.tree.map(lambda new, old: jnp.where(sound, new, old), updated, moments)
    if mode == "running":
        if center:
            scores = scores - place_scores(jnp.full(scores.shape[:1], updated.running.mean), mask)
        scores = scores / moments_std(updated.running)
    elif mode == "ref":
        scores = scores / updated.ref_std
    if scaled_clip_range is not None:
        scores = clip_scores(scores, clip_range=scaled_clip_range)
    return scores, updated


def _full_kl(scored: Scored) -> Float[Array, "N T"]:
    if scored.full_kl is None:
        raise ValueError(
            '`scored.full_kl` must be there for `kl_penalty` "full", got None: make the scoring pass with '
            "`with_full_kl`."
        )
    return scored.full_kl


KL_PENALTIES: Mapping[str, Callable[[Scored], Float[Array, "N T"]]] = {
    "kl": lambda scored: kl_k1(scored.logprobs, scored.ref_logprobs),
    "abs": lambda scored: jnp.abs(kl_k1(scored.logprobs, scored.ref_logprobs)),
    "mse": lambda scored: kl_k2(scored.logprobs, scored.ref_logprobs),
    "full": _full_kl,
}
"""Distance of the policy from its reference at each action, in nats but for "mse", by `PPOConfig.kl_penalty`."""


def shape_rewards(
    scores: Float[Array, "N T"],
    scored: Scored,
    mask: Bool[Array, "N T"],
    *,
    kl_coef: Float[Array, ""],
    kl_penalty: str = "kl",
) -> Float[Array, "N T"]:
    """Rewards of the actions: scores minus the weighed KL penalty; 0 where `mask` is False.

    Args:
      scores: Clipped and scaled, on the tokens they belong to.
      scored: Log-probabilities of policy and reference.
      mask: True on actions.
      kl_coef: Weight of the penalty.
      kl_penalty: A name of `KL_PENALTIES`.
    """
    return zero_masked(scores, mask) - kl_coef * zero_masked(KL_PENALTIES[kl_penalty](scored), mask)


def estimate_advantages(
    scores: Float[Array, "N T"],
    scored: Scored,
    mask: Bool[Array, "N T"],
    *,
    kl_coef: Float[Array, ""],
    gamma: float,
    gae_lambda: float,
    kl_penalty: str = "kl",
    whiten_rewards: bool = False,
) -> PPOTargets:
    """Scores to whitened advantages: minus the KL penalty, then GAE, then whitening over the whole batch.

    Args:
      scores: Clipped and scaled, on the tokens they belong to.
      scored: Log-probabilities and values of the rollouts' own policy.
      mask: True on actions.
      kl_coef: Weight of the KL penalty, subtracted from each token's reward.
      gamma: Discount per token.
      gae_lambda: λ.
      kl_penalty: A name of `KL_PENALTIES`.
      whiten_rewards: Whether rewards are scaled to unit variance over the batch; their mean stays.
    """
    rewards = shape_rewards(scores, scored, mask, kl_coef=kl_coef, kl_penalty=kl_penalty)
    if whiten_rewards:
        rewards = whiten(rewards, mask, shift_mean=False)
    advantages = gae(rewards, scored.values, mask, gamma=gamma, gae_lambda=gae_lambda)
    return PPOTargets(
        old_logprobs=scored.logprobs,
        old_values=scored.values,
        advantages=whiten(advantages, mask),
        # From the raw advantages: whitened ones would train the critic on noise.
        returns=jnp.where(mask, advantages + scored.values, 0.0),
        mask=mask,
    )


def scaled_scores(
    batch: PPOBatch, moments: ScoreMoments, config: PPOConfig
) -> tuple[Float[Array, "N T"], ScoreMoments]:
    """`scale_scores` with all options that the configuration has."""
    return scale_scores(
        batch.scores,
        batch.sequences.mask,
        moments,
        clip_range=config.cliprange_reward,
        mode=config.scale_reward,
        center=config.center_reward,
        scaled_clip_range=config.cliprange_scaled_reward,
    )


def learning_targets(
    scores: Float[Array, "N T"], batch: PPOBatch, kl_coef: Float[Array, ""], config: PPOConfig
) -> PPOTargets:
    """`estimate_advantages` of scaled scores with all options that the configuration has."""
    return estimate_advantages(
        scores,
        batch.scored,
        batch.sequences.mask,
        kl_coef=kl_coef,
        gamma=config.gamma,
        gae_lambda=config.lam,
        kl_penalty=config.kl_penalty,
        whiten_rewards=config.whiten_rewards,
    )


def kl_per_sequence(batch: PPOBatch, kl_penalty: str = "kl") -> Mean:
    """Mean over rollouts of the penalty's sum over actions (of k1, in nats): what the controller steers."""
    mask = batch.sequences.mask
    kl = KL_PENALTIES[kl_penalty](batch.scored)
    return mean_metric(masked_sum(kl, mask, axis=1), jnp.any(mask, axis=1))


def rollout_metrics(batch: PPOBatch, targets: PPOTargets, kl_penalty: str = "kl") -> Metrics:
    """What the rollouts were like, before any training on them. Rewards are neither clipped nor scaled."""
    mask, scored = batch.sequences.mask, batch.scored
    real = jnp.any(mask, axis=1)
    totals = masked_sum(batch.scores, mask, axis=1)
    kl = KL_PENALTIES[kl_penalty](scored)
    spread = masked_variance(targets.returns, mask)
    unexplained = masked_variance(targets.returns - scored.values, mask)
    known = spread > 0
    explained = jnp.where(known, 1 - unexplained / jnp.where(known, spread, 1.0), 0.0)
    return {
        "reward/mean": mean_metric(totals, real),
        "reward/std": Mean(jnp.sqrt(masked_variance(totals, real)), jnp.float32(1)),
        "kl/per_token": mean_metric(kl, mask),
        "kl/per_sequence": kl_per_sequence(batch, kl_penalty),
        "ppo/explained_variance": Mean(explained, known.astype(jnp.float32)),
        "completion/length_mean": mean_metric(jnp.sum(mask, axis=1, dtype=jnp.float32), real),
    }
