# SPDX-License-Identifier: Apache-2.0
"""Breaches of the rules that the learners hold."""

from __future__ import annotations

from tests.mutation_patches.base import Mutation

ACCUMULATE = "jrl/learners/accumulate.py"
OPTIMIZERS = "jrl/learners/optimizers.py"
FORWARD = "jrl/learners/forward.py"
PPO = "jrl/learners/ppo.py"
ESTIMATES = "jrl/learners/ppo_estimates.py"
SFT = "jrl/learners/sft.py"

PATCHES = [
    Mutation(  # the last action of a row, its EOS, is dropped
        rule="1.4",
        file=FORWARD,
        old="mask=sequences.mask & valid[:, None]",
        new="mask=sequences.mask & jnp.roll(sequences.mask, -1, axis=1) & valid[:, None]",
        test="tests/learners/test_ppo.py::test_lore_1_4_a_reward_for_stopping_raises_the_logit_of_eos",
    ),
    Mutation(  # garbage of padded rows reaches the reduction
        rule="1.12",
        file=ESTIMATES,
        old="totals, real = masked_sum(scores, mask, axis=1), jnp.any(mask, axis=1)",
        new="totals, real = masked_sum(scores, mask, axis=1), jnp.ones(mask.shape[0], bool)",
        test="tests/learners/test_ppo.py::test_lore_1_12_rows_without_actions_change_nothing",
    ),
    Mutation(  # new log-probabilities at temperature 1
        rule="2.1",
        file="jrl/learners/ppo.py",
        old="temperature=temperature,\n        chunk_bytes",
        new="temperature=1.0,\n        chunk_bytes",
        test="tests/learners/test_ppo.py::test_lore_2_1_the_update_divides_logits_by_the_temperature",
    ),
    Mutation(  # the first minibatch is measured after the others
        rule="2.3",
        file=PPO,
        old="Max(first.value[0])",
        new="Max(first.value[-1])",
        test="tests/learners/test_ppo.py::test_lore_2_3_the_first_ratio_is_one",
    ),
    Mutation(  # the controller's unit becomes the token
        rule="3.9",
        file=ESTIMATES,
        old="return mean_metric(masked_sum(kl, mask, axis=1), jnp.any(mask, axis=1))",
        new="return mean_metric(kl, mask)",
        test="tests/learners/test_ppo_estimates.py::test_lore_3_9_kl_is_reported_per_token_and_per_sequence",
    ),
    Mutation(
        rule="3.8",
        file=PPO,
        old="num_rollouts=kl.weight,",
        new="num_rollouts=kl.weight * config.ppo_epochs,",
        test="tests/learners/test_ppo.py::TestKLController::"
        "test_lore_3_8_it_moves_once_an_iteration_by_the_number_of_rollouts",
    ),
    Mutation(
        rule="4.3",
        file=ESTIMATES,
        old="returns=jnp.where(mask, advantages + scored.values, 0.0)",
        new="returns=jnp.where(mask, whiten(advantages, mask) + scored.values, 0.0)",
        test="tests/learners/test_ppo_estimates.py::test_lore_4_3_returns_come_from_raw_advantages",
    ),
    Mutation(
        rule="4.15",
        file=ESTIMATES,
        old="    if clip_range:\n",
        new="    if clip_range and mode:\n",
        test="tests/learners/test_ppo_estimates.py::"
        "test_lore_4_15_scores_are_clipped_before_the_penalty_and_whitened_last",
    ),
    Mutation(
        rule="4.18",
        file=PPO,
        old="if config.gamma < 1:",
        new="if config.gamma < 0:",
        test="tests/learners/test_ppo.py::test_lore_4_18_a_discount_is_warned_of",
    ),
    Mutation(  # the mean of microbatch means
        rule="5.2",
        file=ACCUMULATE,
        old="        return loss_sum, (weight, metrics)",
        new="        return loss_sum / weight, (jnp.ones(()), metrics)",
        test="tests/learners/test_accumulate.py::test_lore_5_2_one_denominator_for_the_whole_batch",
    ),
    Mutation(  # the ratio is measured from the current policy
        rule="5.9",
        file=PPO,
        old="targets._replace(mask=mask)",
        new="targets._replace(mask=mask, old_logprobs=jax.lax.stop_gradient(now.logprobs))",
        test="tests/learners/test_ppo.py::"
        "test_lore_5_9_old_logprobs_are_those_of_the_rollouts_in_every_epoch",
    ),
    Mutation(  # the prompt is learned as well
        rule="5.12",
        file=SFT,
        old="sft_loss(logprobs, sequences.mask, token_loss=token_loss)",
        new="sft_loss(logprobs, sequences.mask | True, token_loss=token_loss)",
        test="tests/learners/test_sft.py::"
        "test_lore_5_12_only_completions_are_learned_as_a_mean_over_all_tokens",
    ),
    Mutation(  # ε inside the root
        rule="7.1",
        file=OPTIMIZERS,
        old="chain(_decay(weight_decay), optax.scale_by_adam(b1=betas[0], b2=betas[1], eps=eps))",
        new="chain(_decay(weight_decay), optax.scale_by_adam(b1=betas[0], b2=betas[1], eps=0, eps_root=eps**2))",
        test="tests/learners/test_optimizers.py::TestAdam::"
        "test_lore_7_1_epsilon_is_outside_the_root_of_the_corrected_moment",
    ),
    Mutation(  # master weights of 16 bits
        rule="7.2",
        file=ACCUMULATE,
        old="        (optax.apply_updates(state.params, updates), opt_state),",
        new="        (jax.tree.map(lambda p, u: (p + u).astype(jnp.bfloat16).astype(p.dtype), state.params, updates),"
        " opt_state),",
        test="tests/learners/test_accumulate.py::test_lore_7_2_small_updates_move_the_master_weights",
    ),
    Mutation(  # each microbatch is clipped by itself
        rule="7.3",
        file=ACCUMULATE,
        old="jax.tree.map(jnp.add, grads, more_grads)",
        new="jax.tree.map(lambda a, b: a + b / jnp.maximum(1.0, jnp.linalg.norm(b)), grads, more_grads)",
        test="tests/learners/test_accumulate.py::"
        "test_lore_7_3_the_accumulated_gradient_is_clipped_and_its_norm_logged_before",
    ),
    Mutation(  # one step ahead
        rule="7.4",
        file=OPTIMIZERS,
        old="rate = jnp.asarray(schedule(state.steps), jnp.float32)",
        new="rate = jnp.asarray(schedule(state.steps + 1), jnp.float32)",
        test="tests/learners/test_optimizers.py::TestSchedules::"
        "test_lore_7_4_the_rate_used_is_the_one_logged_and_counts_optimizer_steps",
    ),
    Mutation(  # biases decay
        rule="7.5",
        file=OPTIMIZERS,
        old='UNDECAYED = ("bias", "scale", "magnitude")',
        new='UNDECAYED = ("scale", "magnitude")',
        test="tests/learners/test_optimizers.py::test_lore_7_5_decay_skips_norms_and_biases",
    ),
    Mutation(  # an infinite loss with a finite gradient is stepped on
        rule="7.6",
        file=ACCUMULATE,
        old="jnp.where(jnp.isfinite(mean_loss), 1.0 / divisor, jnp.nan)",
        new="1.0 / divisor",
        test="tests/learners/test_accumulate.py::"
        "test_lore_7_6_a_step_that_is_not_finite_is_skipped_and_counted",
    ),
    Mutation(  # one bad score stays in the moments
        rule="7.6",
        file=ESTIMATES,
        old="sound = jnp.isfinite(running.mean) & jnp.isfinite(running.variance)",
        new="sound = jnp.bool_(True)",
        test="tests/learners/test_ppo.py::TestNonFinite::"
        "test_lore_7_6_a_bad_reward_leaves_parameters_moments_and_controller",
    ),
    Mutation(  # the order of minibatches comes from the clock
        rule="9.2",
        file="jrl/learners/ppo_epochs.py",
        old="draws = jax.random.uniform(key, mask.shape[:1])",
        new='draws = jax.random.uniform(jax.random.key(__import__("time").time_ns() % 10**6), mask.shape[:1])',
        test="tests/learners/test_ppo.py::test_lore_9_2_the_same_key_gives_the_same_bits",
    ),
    Mutation(  # a sign error between scores and advantages
        rule="9.5",
        file=ESTIMATES,
        old="rewards = shape_rewards(scores,",
        new="rewards = shape_rewards(-scores,",
        test="tests/learners/test_ppo_controls.py::test_lore_9_5_a_reversed_reward_makes_the_score_fall",
    ),
    Mutation(  # the advantage of an action is given to the one before
        rule="9.6",
        file=ESTIMATES,
        old="advantages=whiten(advantages, mask)",
        new="advantages=jnp.roll(whiten(advantages, mask), -1, axis=1)",
        test="tests/learners/test_ppo_controls.py::test_lore_9_6_a_known_optimum_is_reached_by_every_seed",
    ),
]
