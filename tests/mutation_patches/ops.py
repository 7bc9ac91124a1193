# SPDX-License-Identifier: Apache-2.0
"""Breaches of the rules that `jrl.ops` and `jrl.losses` hold."""

from __future__ import annotations

from tests.mutation_patches.base import Mutation

ALIGNMENT, KL, LOGPROBS, MASKING = (f"jrl/ops/{x}.py" for x in ("alignment", "kl", "logprobs", "masking"))
POLICY_GRADIENT, REDUCTIONS = "jrl/ops/policy_gradient.py", "jrl/ops/reductions.py"
RETURNS, REWARDS = "jrl/ops/returns.py", "jrl/ops/rewards.py"
PPO = "jrl/losses/ppo.py"

PATCHES = [
    Mutation(
        rule="1.5",
        file=ALIGNMENT,
        old="dtype=lengths.dtype)[None, :] < lengths[:, None]",
        new="dtype=lengths.dtype)[None, :] <= lengths[:, None]",
        test="tests/ops/test_alignment.py::TestLengthMask::"
        "test_lore_1_5_everything_after_the_end_is_masked_and_nothing_before",
    ),
    Mutation(
        rule="1.6",
        file=ALIGNMENT,
        old="window_columns(starts + 1,",
        new="window_columns(starts,",
        test="tests/ops/test_alignment.py::TestWindow::"
        "test_lore_1_6_states_predict_the_token_one_to_the_right",
    ),
    Mutation(
        rule="1.7",
        file=MASKING,
        old="return jnp.where(mask, at_least_float32(x), 0.0)",
        new="return at_least_float32(x)",
        test="tests/losses/test_ppo.py::TestGradients::test_lore_1_7_context_tokens_have_no_influence",
    ),
    Mutation(
        rule="1.12",
        file=MASKING,
        old="/ jnp.maximum(jnp.sum(mask, axis=axis, dtype=total.dtype), 1.0)",
        new="/ jnp.sum(mask, axis=axis, dtype=total.dtype)",
        test="tests/ops/test_reductions.py::TestEveryReduction::"
        "test_lore_1_12_a_row_without_actions_adds_nothing",
    ),
    Mutation(
        rule="2.1",
        file=LOGPROBS,
        old="at_least_float32(logits_fn(hidden)) / temperature",
        new="at_least_float32(logits_fn(hidden))",
        test="tests/ops/test_logprobs.py::TestTokenLogprobs::"
        "test_lore_2_1_logits_are_divided_by_the_temperature",
    ),
    Mutation(
        rule="2.4",
        file=LOGPROBS,
        old="    logits = at_least_float32(logits)\n",
        new="    logits = at_least_float32(logits.astype(jnp.bfloat16))\n",
        test="tests/ops/test_logprobs.py::TestLogprobsFromLogits::test_lore_2_4_log_softmax_is_float32",
    ),
    Mutation(
        rule="2.11",
        file=POLICY_GRADIENT,
        old="jnp.exp(jnp.clip(logprobs - old_logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO))",
        new="jnp.exp(logprobs - old_logprobs)",
        test="tests/losses/test_ppo.py::TestGradients::"
        "test_lore_2_11_extreme_log_ratios_are_finite_and_reported",
    ),
    Mutation(
        rule="2.11",
        file=PPO,
        old="max_metric(jnp.abs(logprobs - old_logprobs), mask)",
        new="max_metric(jnp.abs(jnp.log(ratio)), mask)",
        test="tests/losses/test_ppo.py::TestGradients::"
        "test_lore_2_11_extreme_log_ratios_are_finite_and_reported",
    ),
    Mutation(
        rule="3.1",
        file=KL,
        old="log_r = -kl_k1(logprobs, ref_logprobs)",
        new="log_r = kl_k1(logprobs, ref_logprobs)",
        test="tests/ops/test_kl.py::TestValues::"
        "test_lore_3_1_k1_and_k3_are_unbiased_and_k2_and_k3_not_negative",
    ),
    Mutation(
        rule="3.2",
        file=KL,
        old="return 0.5 * jnp.square(kl_k1(logprobs, ref_logprobs))",
        new="return jnp.square(kl_k1(logprobs, ref_logprobs))",
        test="tests/ops/test_kl.py::TestGradients::test_lore_3_2_what_each_estimator_descends_as_a_loss",
    ),
    Mutation(
        rule="3.3",
        file=REWARDS,
        old="kl_coef * kl_k1(zero_masked(logprobs, mask), zero_masked(ref_logprobs, mask))",
        new="kl_coef * 0.5 * kl_k1(zero_masked(logprobs, mask), zero_masked(ref_logprobs, mask)) ** 2",
        test="tests/ops/test_kl.py::TestSequenceKL::"
        "test_lore_3_3_k1_as_a_reward_gives_the_sequence_gradient_and_k2_as_a_loss_does_not",
    ),
    Mutation(
        rule="3.4",
        file=KL,
        old="(k2 - jax.lax.stop_gradient(k2)) + jax.lax.stop_gradient(k3)",
        new="(k3 - jax.lax.stop_gradient(k2)) + jax.lax.stop_gradient(k2)",
        test="tests/ops/test_kl.py::TestGradients::"
        "test_lore_3_4_straight_through_has_the_value_of_k3_and_the_gradient_of_k2",
    ),
    Mutation(
        rule="3.5",
        file=KL,
        old="importance_ratio(logprobs, jax.lax.stop_gradient(old_logprobs)) * kl",
        new="jax.lax.stop_gradient(importance_ratio(logprobs, old_logprobs)) * kl",
        test="tests/ops/test_kl.py::TestGradients::test_lore_3_5_off_policy_samples_need_the_ratio",
    ),
    Mutation(
        rule="3.7",
        file=LOGPROBS,
        old="        entropy = entropy_from_logits(logits) if with_entropy else None\n",
        new="        logits = jnp.where(logits < jnp.max(logits, -1, keepdims=True) - 5, -jnp.inf, logits)\n"
        "        entropy = entropy_from_logits(logits) if with_entropy else None\n",
        test="tests/ops/test_logprobs.py::TestTokenLogprobs::test_lore_3_7_kl_reads_unfiltered_logits",
    ),
    Mutation(
        rule="3.8",
        file=KL,
        old="jnp.clip(kl / target_kl - 1.0, -0.2, 0.2)",
        new="jnp.clip(1.0 - kl / target_kl, -0.2, 0.2)",
        test="tests/ops/test_kl.py::TestAdaptiveKLCoef::test_lore_3_8_closed_form_after_k_updates",
    ),
    Mutation(
        rule="4.1",
        file=REWARDS,
        old="is_last = mask & (actions_from_here == 1)",
        new="is_last = jnp.zeros_like(mask).at[:, -1].set(True)",
        test="tests/ops/test_rewards.py::TestPlaceScores::test_lore_4_1_the_score_lands_on_the_last_action",
    ),
    Mutation(
        rule="4.2",
        file=RETURNS,
        old="jnp.where(acts, value, next_value)), advantage",
        new="value), advantage",
        test="tests/ops/test_returns.py::TestGAE::test_lore_4_2_equals_the_definition_over_actions",
    ),
    Mutation(
        rule="4.3",
        file=RETURNS,
        old="    return zero_masked(advantages.T, mask)",
        new="    centred = advantages.T - jnp.mean(advantages)\n    return zero_masked(centred, mask)",
        test="tests/ops/test_returns.py::TestGAE::test_lore_4_3_returns_are_raw_advantages_plus_old_values",
    ),
    Mutation(
        rule="4.4",
        file=MASKING,
        old="whitened if shift_mean else whitened + mean, mask",
        new="whitened, mask",
        test="tests/ops/test_masking.py::TestWhiten::"
        "test_lore_4_4_masked_statistics_centre_advantages_and_only_scale_rewards",
    ),
    Mutation(
        rule="4.5",
        file=POLICY_GRADIENT,
        old="0.5 * jnp.maximum(error, clipped_error)",
        new="0.5 * jnp.minimum(error, clipped_error)",
        test="tests/ops/test_policy_gradient.py::TestClippedValueLoss::test_lore_4_5_the_larger_error_counts",
    ),
    Mutation(
        rule="4.8",
        file=REWARDS,
        old="jnp.where(terminated, scores, scores - penalty)",
        new="jnp.where(terminated, scores - penalty, scores)",
        test="tests/ops/test_rewards.py::test_lore_4_8_the_penalty_is_the_only_difference_without_eos",
    ),
    Mutation(
        rule="4.15",
        file=REWARDS,
        old="return zero_masked(scores, mask) - penalty",
        new="return jnp.maximum(zero_masked(scores, mask) - penalty, -1.0)",
        test="tests/ops/test_rewards.py::test_lore_4_15_the_penalty_is_subtracted_after_clipping",
    ),
    Mutation(
        rule="5.1",
        file=REDUCTIONS,
        old="return jnp.sum(masked_mean(losses, mask, axis=1)), _num_rows(mask)",
        new="return masked_sum(losses, mask), jnp.sum(mask, dtype=jnp.float32)",
        test="tests/ops/test_reductions.py::test_lore_5_1_what_a_short_and_a_long_completion_weigh",
    ),
    Mutation(
        rule="5.3",
        file=POLICY_GRADIENT,
        old="return -jnp.minimum(ratio * advantages,",
        new="return -jnp.maximum(ratio * advantages,",
        test="tests/ops/test_policy_gradient.py::TestClippedSurrogate::"
        "test_lore_5_3_gradient_is_zero_only_where_the_table_says",
    ),
    Mutation(
        rule="5.5",
        file=PPO,
        old="policy_losses = clipped_surrogate(logprobs,",
        new="policy_losses = clipped_surrogate(jax.lax.stop_gradient(logprobs),",
        test="tests/losses/test_ppo.py::TestIdentities::"
        "test_lore_5_5_on_policy_the_loss_is_zero_and_the_gradient_is_not",
    ),
    Mutation(
        rule="5.6",
        file=PPO,
        old="jax.lax.stop_gradient(zero_masked(x, mask)) for x in fixed.values()",
        new="zero_masked(x, mask) for x in fixed.values()",
        test="tests/losses/test_ppo.py::TestGradients::test_lore_5_6_no_gradient_reaches_the_targets",
    ),
    Mutation(
        rule="5.10",
        file=PPO,
        old="losses = losses - entropy_coef * entropy",
        new="losses = losses + entropy_coef * entropy",
        test="tests/losses/test_ppo.py::TestEntropyBonus::test_lore_5_10_the_bonus_raises_entropy_on_a_bandit",
    ),
    Mutation(
        rule="5.11",
        file="jrl/ops/chunks.py",
        old="        x = jnp.moveaxis(x, (0, 1), (1, 2))\n",
        new="",
        test="tests/ops/test_logprobs.py::TestTokenLogprobs::test_lore_5_11_chunks_equal_the_plain_path",
    ),
    Mutation(
        rule="5.13",
        file=POLICY_GRADIENT,
        old="low_negative=(advantages < 0) & (ratio < 1 - clip_range)",
        new="low_negative=ratio < 1 - clip_range",
        test="tests/losses/test_ppo.py::TestGolden::test_lore_5_13_clip_metrics_are_split_by_side_and_sign",
    ),
    Mutation(
        rule="7.7",
        file=LOGPROBS,
        old="jnp.exp(logprobs) * (_finite_or_zero(logprobs) + entropy[..., None])",
        new="jnp.exp(logprobs) * (logprobs + entropy[..., None])",
        test="tests/ops/test_logprobs.py::TestLogprobsFromLogits::"
        "test_lore_7_7_gradient_is_finite_beside_minus_infinity",
    ),
    Mutation(  # the last column instead of the last real token
        rule="4.7",
        file="jrl/ops/rewards.py",
        old="return jnp.sum(jnp.where(attention_mask & (real_from_here == 1), scores, 0.0), axis=1)",
        new="return jnp.where(real_from_here[:, 0] > 0, scores[:, -1], 0.0)",
        test="tests/ops/test_rewards.py::TestRewardModelScores::test_lore_4_7_padding_does_not_move_the_score",
    ),
    Mutation(
        rule="4.7",
        file="jrl/ops/rewards.py",
        old="centred = scores - jnp.mean(reference_scores)",
        new="centred = scores",
        test="tests/ops/test_rewards.py::TestRewardModelScores::"
        "test_lore_4_7_reference_completions_score_zero_on_average",
    ),
    Mutation(  # with replacement: the plug-in estimate
        rule="9.3",
        file="jrl/ops/pass_rates.py",
        old="jnp.maximum(num_samples - num_correct[:, None] - drawn, 0)",
        new="(num_samples - num_correct[:, None]) * (1 - drawn / num_samples)",
        test="tests/ops/test_pass_rates.py::TestPassAtK::test_lore_9_3_is_unbiased",
    ),
]
