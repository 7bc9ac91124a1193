# SPDX-License-Identifier: Apache-2.0
"""Policy gradients without a critic: GRPO and its relatives, as switches of one configuration.

`GRPOConfig()` (`jrl.learners.grpo_config`) has the defaults that jrl recommends; `algorithm("dapo")`
(`jrl.learners.grpo_algorithms`) is the configuration of a published algorithm. No name is asked for here:
`grpo_recipe` binds switches to functions.

Reference: Shao et al. 2024, arXiv:2402.03300 (GRPO); the others stand beside their names in `ALGORITHMS`.
"""

from __future__ import annotations

from jrl.learners.credit import Scaling, penalize, unpenalized
from jrl.learners.groups import Selection, as_they_are, decoupled_scores
from jrl.learners.grpo_config import (
    CORRECTIONS,
    ESTIMATORS,
    KL_ESTIMATORS,
    RATIOS,
    REDUCTIONS,
    SURROGATES,
    GRPOConfig,
)
from jrl.learners.recipe import KLControl, PolicyLoss, Recipe
from jrl.losses.policy_gradient import KLTerm
from jrl.ops.reductions import group_token_shares
from jrl.typing import SamplingRules


def grpo_recipe(config: GRPOConfig) -> Recipe:
    """A policy gradient without a critic as its configuration describes it."""
    estimator, correction = ESTIMATORS[config.estimator], CORRECTIONS[config.importance_sampling_mode]
    weights = None if config.reward_weights is None else tuple(config.reward_weights)
    decoupled = config.multi_objective_aggregation == "normalize_then_sum"
    aggregate = decoupled_scores(weights) if decoupled else None
    return Recipe(
        prefix="grpo",
        estimate=estimator.make(config) if aggregate is None else as_they_are(),
        loss=grpo_policy_loss(config),
        penalize=penalize("kl") if config.kl_in_reward else unpenalized,
        kl=KLControl(coef=config.beta) if config.beta else None,
        scaling=Scaling(clip_range=config.reward_clip_range),
        num_epochs=config.num_iterations,
        max_policy_kl=config.max_policy_kl,
        sampling=SamplingRules(
            mixed_only=config.drop_uniform_groups,
            max_rounds=config.max_sampling_rounds,
            prompts_per_round=config.prompts_per_round,
            mask_truncated=config.mask_truncated_completions,
            overlong_buffer=config.overlong_buffer_len,
            overlong_penalty=config.overlong_penalty,
            refuse_negative=estimator.divides_by_mean,
        ),
        select=Selection(
            num_kept=config.num_kept,
            by_efficiency=config.keep_by == "reward_per_token",
            needs_sampler=correction is not None
            or config.old_logprobs_from_sampler
            or config.off_policy_mask_threshold is not None,
        ),
        weigh=None if correction is None else correction(config),
        shares=group_token_shares if config.reduction == "group_token" else None,
        old_logprobs_from_sampler=config.old_logprobs_from_sampler,
        compares_scores=estimator.grouped and not config.kl_in_reward,
        greedy_baseline=estimator.with_greedy,
        reward_weights=weights,
        aggregate=aggregate,
    )


def grpo_policy_loss(config: GRPOConfig) -> PolicyLoss:
    """The loss of a minibatch: ratio, surrogate, reduction and KL term as configured."""
    return PolicyLoss(
        prefix="grpo",
        surrogate=SURROGATES[config.surrogate](config),
        ratio=RATIOS[config.importance_sampling_level](config),
        reduction=REDUCTIONS[config.reduction](config),
        kl=KLTerm(config.beta, KL_ESTIMATORS[config.kl_estimator], config.use_bias_correction_kl)
        if config.kl_in_loss
        else None,
        entropy_coef=config.entropy_coef,
        off_policy_threshold=config.off_policy_mask_threshold,
    )
