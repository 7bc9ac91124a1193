# SPDX-License-Identifier: Apache-2.0
"""Breaches of the rules of groups, ratios, surrogates and sampler corrections."""

from __future__ import annotations

from tests.mutation_patches.base import Mutation

ADVANTAGES = "tests/ops/test_advantages.py::"

# fmt: off
PATCHES = [
    Mutation("4.9", "jrl.ops.groups.group_statistics",
             "high > low", "high >= low",
             ADVANTAGES + "TestEveryEstimator::test_lore_4_9_equal_scores_teach_exactly_nothing"),
    Mutation("4.10", "jrl.ops.advantages.group_relative_advantages",
             "_statistics(scores, groups, valid, ddof)", "_statistics(scores, groups, valid, 1)",
             ADVANTAGES + "test_lore_4_10_the_deviation_has_ddof_0"),
    Mutation("4.11", "jrl.ops.advantages._group_deviation",
             "jnp.where(stats.is_mixed, stats.std, 1.0)", "jnp.where(stats.is_mixed, jnp.square(stats.std), 1.0)",
             ADVANTAGES + "test_lore_4_11_dividing_by_the_deviation_favours_the_easy_and_the_hard"),
    Mutation("4.12", "jrl.ops.advantages.leave_one_out_advantages",
             "jnp.maximum(stats.size - 1.0, 1.0)", "jnp.maximum(stats.size, 1.0)",
             ADVANTAGES + "test_lore_4_12_leave_one_out_is_the_centred_score_times_k_over_k_minus_one"),
    Mutation("4.13", "jrl.ops.groups.group_numbers",
             "jnp.reshape(numbers, groups.shape)", "jnp.sort(numbers)",
             ADVANTAGES + "TestEveryEstimator::test_lore_4_13_neither_order_nor_numbers_of_the_groups_matter"),
    Mutation("4.14", "jrl.rollout.reward_columns._weighted_sum",
             "math.fsum(known) if known else math.nan", "math.fsum(known)",
             "tests/rollout/test_reward_columns.py::"
             "test_lore_4_14_a_reward_that_does_not_apply_is_absent_from_the_sum"),
    Mutation("4.14", "jrl.ops.advantages.decoupled_advantages",
             "known = valid[:, None] & ~jnp.isnan(scores)",
             "scores = jnp.nan_to_num(scores)\nknown = valid[:, None] & ~jnp.isnan(scores)",
             ADVANTAGES + "TestSeveralFunctions::test_lore_4_14_a_reward_that_does_not_apply_is_absent_and_not_zero"),
    Mutation("4.14", "jrl.ops.advantages.decoupled_advantages",
             "jnp.sum(weighed, axis=1)", "jnp.sum(scores * weights[None, :], axis=1)",
             ADVANTAGES + "TestSeveralFunctions::test_lore_4_14_normalised_first_one_and_the_other_differ"),
    Mutation("4.16", "jrl.ops.rewards.overlong_penalty",
             "(max_length - buffer_length) - lengths", "max_length - lengths",
             "tests/ops/test_rewards.py::TestOverlongPenalty::"
             "test_lore_4_16_it_grows_from_one_knee_to_the_other"),
    Mutation("4.16", "jrl.rollout.assemble.assemble",
             "overlong.size * penalties", "penalties",
             "tests/rollout/test_dynamic_sampling.py::"
             "test_lore_4_16_the_penalty_joins_the_score_after_the_groups_are_chosen"),
    Mutation("4.17", "jrl.ops.groups.group_statistics",
             "high > low", "high >= low",
             "tests/ops/test_groups.py::test_lore_4_17_groups_without_contrast_are_found"),
    Mutation("4.17", "jrl.rollout.group_scores.GroupScores.mixed",
             "highest > lowest", "highest >= lowest",
             "tests/rollout/test_group_scores.py::test_lore_4_17_the_host_finds_the_groups_without_contrast"),
    Mutation("4.17", "jrl.rollout.experience.ExperienceCollector._fill",
             "judged.groups.mixed", "np.ones(len(judged.groups.scores))",
             "tests/rollout/test_dynamic_sampling.py::test_lore_4_17_dropped_groups_are_refilled_in_order"),
    Mutation("5.4", "jrl.ops.policy_gradient.clipped_ratio_loss",
             "jnp.minimum(losses, -dual_clip * advantages)", "jnp.maximum(losses, -dual_clip * advantages)",
             "tests/ops/test_surrogates.py::TestClippedRatio::"
             "test_lore_5_4_a_dual_clip_bounds_the_loss_of_bad_actions"),
    Mutation("5.7", "jrl.ops.ratios._mean_log_ratio",
             "masked_mean(_log_ratio(logprobs, old_logprobs, mask), mask, axis=1)",
             "masked_sum(_log_ratio(logprobs, old_logprobs, mask), mask, axis=1)",
             "tests/ops/test_ratios.py::TestSequence::"
             "test_lore_5_7_one_ratio_a_row_with_the_gradient_through_the_mean"),
    Mutation("5.8", "jrl.ops.surrogates._weighted",
             "jax.lax.stop_gradient(weights)", "weights",
             "tests/ops/test_surrogates.py::TestCISPO::test_lore_5_8_every_action_keeps_a_gradient"),
    Mutation("6.1", "jrl.ops.sampler_correction._log_weights",
             "bounded_log_ratio(zero_masked(old_logprobs, mask), zero_masked(sampler_logprobs, mask))",
             "bounded_log_ratio(zero_masked(sampler_logprobs, mask), zero_masked(old_logprobs, mask))",
             "tests/exact/test_tree.py::"
             "test_lore_6_1_the_product_weight_makes_another_samplers_gradient_exact"),
    Mutation("6.2", "jrl.ops.sampler_correction.drop_weights",
             "jnp.where((weights < low) | (weights > high), 0.0, weights)", "jnp.clip(weights, low, high)",
             "tests/ops/test_sampler_correction.py::"
             "test_lore_6_2_what_is_outside_the_band_weighs_nothing"),
    Mutation("6.3", "jrl.learners.grpo_config.GRPOConfig._sampler_conflicts",
             "self.old_logprobs_from_sampler and corrected", "False",
             "tests/learners/test_grpo.py::TestAnchor::"
             "test_lore_6_3_a_correction_beside_the_samplers_anchor_is_refused"),
    Mutation("4.17", "jrl.learners.groups.Selection.__call__",
             "mask & keep[:, None]", "mask",
             "tests/learners/test_grpo.py::TestSelection::"
             "test_lore_4_17_dropped_groups_leave_the_denominators_and_are_counted"),
    Mutation("6.6", "jrl.ops.sampler_correction.effective_sample_size",
             "jnp.square(total)", "total",
             "tests/ops/test_sampler_correction.py::"
             "test_lore_6_6_the_effective_sample_size_has_its_closed_forms"),
]
