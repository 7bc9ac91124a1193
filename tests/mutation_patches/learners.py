# SPDX-License-Identifier: Apache-2.0
"""Breaches of the rules that the learners hold."""

from __future__ import annotations

from tests.mutation_patches.base import Mutation

# fmt: off
PATCHES = [
    # the last action of a row, its EOS, is dropped
    Mutation("1.4", "jrl.learners.forward.mask_rows",
             "sequences.mask", "sequences.mask & jnp.roll(sequences.mask, -1, axis=1)",
             "tests/learners/test_ppo.py::test_lore_1_4_a_reward_for_stopping_raises_the_logit_of_eos"),
    # garbage of padded rows reaches the reduction
    Mutation("1.12", "jrl.learners.credit.Scaling.__call__",
             "jnp.any(mask, axis=1)", "jnp.ones(mask.shape[0], bool)",
             "tests/learners/test_ppo.py::test_lore_1_12_rows_without_actions_change_nothing"),
    # new log-probabilities at temperature 1
    Mutation("2.1", "jrl.forward.Reader.__call__",
             "_(temperature=self.temperature)", "_(temperature=1.0)",
             "tests/learners/test_ppo.py::test_lore_2_1_the_update_divides_logits_by_the_temperature"),
    # the first minibatch is measured after the others
    Mutation("2.3", "jrl.learners.online._metrics_of_steps",
             "0", "-1",
             "tests/learners/test_ppo.py::test_lore_2_3_the_first_ratio_is_one"),
    # the controller's unit becomes the token
    Mutation("3.9", "jrl.learners.credit.kl_per_sequence",
             "mean_metric(masked_sum(kl, mask, axis=1), jnp.any(mask, axis=1))", "mean_metric(kl, mask)",
             "tests/learners/test_credit.py::test_lore_3_9_kl_is_reported_per_token_and_per_sequence"),
    Mutation("3.8", "jrl.learners.online._next_kl_coef",
             "_(num_rollouts=kl.weight)", "_(num_rollouts=kl.weight * recipe.num_epochs)",
             "tests/learners/test_ppo.py::TestKLController::"
             "test_lore_3_8_it_moves_once_an_iteration_by_the_number_of_rollouts"),
    Mutation("4.3", "jrl.learners.credit.generalized_advantages",
             "advantages + values", "whiten(advantages, mask) + values",
             "tests/learners/test_credit.py::test_lore_4_3_returns_come_from_raw_advantages"),
    Mutation("4.15", "jrl.learners.credit.Scaling.__call__",
             "if self.clip_range:\n    rewards = clip_scores(rewards, clip_range=self.clip_range)",
             "if self.clip_range and self.mode:\n    rewards = clip_scores(rewards, clip_range=self.clip_range)",
             "tests/learners/test_credit.py::"
             "test_lore_4_15_scores_are_clipped_before_the_penalty_and_whitened_last"),
    Mutation("4.18", "jrl.learners.ppo._warn_of_discount",
             "1", "0",
             "tests/learners/test_ppo.py::test_lore_4_18_a_discount_is_warned_of"),
    # the mean of microbatch means
    Mutation("5.2", "jrl.learners.accumulate.accumulate.loss",
             "(loss_sum, (weight, metrics))", "(loss_sum / weight, (jnp.ones(()), metrics))",
             "tests/learners/test_accumulate.py::test_lore_5_2_one_denominator_for_the_whole_batch"),
    # the ratio is measured from the current policy
    Mutation("5.9", "jrl.learners.online.online_objective",
             "targets._replace(mask=sequences.mask)",
             "targets._replace(mask=sequences.mask, old_logprobs=jax.lax.stop_gradient(now.logprobs))",
             "tests/learners/test_ppo.py::test_lore_5_9_old_logprobs_are_those_of_the_rollouts_in_every_epoch"),
    # the prompt is learned as well
    Mutation("5.12", "jrl.learners.sft.sft_objective",
             "sft_loss(logprobs, sequences.mask, token_loss=token_loss)",
             "sft_loss(logprobs, sequences.mask | True, token_loss=token_loss)",
             "tests/learners/test_sft.py::test_lore_5_12_only_completions_are_learned_as_a_mean_over_all_tokens"),
    # ε inside the root
    Mutation("7.1", "jrl.learners.optimizers._adam",
             "optax.scale_by_adam(b1=betas[0], b2=betas[1], eps=eps)",
             "optax.scale_by_adam(b1=betas[0], b2=betas[1], eps=0, eps_root=eps ** 2)",
             "tests/learners/test_optimizers.py::TestAdam::"
             "test_lore_7_1_epsilon_is_outside_the_root_of_the_corrected_moment"),
    # master weights of 16 bits
    Mutation("7.2", "jrl.learners.accumulate.optimizer_step",
             "optax.apply_updates(state.params, updates)",
             "jax.tree.map(lambda p, u: (p + u).astype(jnp.bfloat16).astype(p.dtype), state.params, updates)",
             "tests/learners/test_accumulate.py::test_lore_7_2_small_updates_move_the_master_weights"),
    # each microbatch is clipped by itself
    Mutation("7.3", "jrl.learners.accumulate.accumulate.add",
             "jnp.add", "lambda a, b: a + b / jnp.maximum(1.0, jnp.linalg.norm(b))",
             "tests/learners/test_accumulate.py::"
             "test_lore_7_3_the_accumulated_gradient_is_clipped_and_its_norm_logged_before"),
    # one step ahead
    Mutation("7.4", "jrl.learners.optimizers._scale_by_rate.update",
             "schedule(state.steps)", "schedule(state.steps + 1)",
             "tests/learners/test_optimizers.py::TestSchedules::"
             "test_lore_7_4_the_rate_used_is_the_one_logged_and_counts_optimizer_steps"),
    # biases decay
    Mutation("7.5", "jrl.learners.optimizers.decayed",
             "name not in UNDECAYED and not name.endswith('bias')", "name not in UNDECAYED",
             "tests/learners/test_optimizers.py::test_lore_7_5_decay_skips_norms_and_biases"),
    # an infinite loss with a finite gradient is stepped on
    Mutation("7.6", "jrl.learners.accumulate.accumulate",
             "jnp.where(jnp.isfinite(mean_loss), 1.0 / divisor, jnp.nan)", "1.0 / divisor",
             "tests/learners/test_accumulate.py::test_lore_7_6_a_step_that_is_not_finite_is_skipped_and_counted"),
    # one bad score stays in the moments
    Mutation("7.6", "jrl.learners.credit.Scaling.__call__",
             "jnp.isfinite(running.mean) & jnp.isfinite(running.variance)", "jnp.bool_(True)",
             "tests/learners/test_ppo.py::TestNonFinite::"
             "test_lore_7_6_a_bad_reward_leaves_parameters_moments_and_controller"),
    # the order of minibatches comes from the clock
    Mutation("9.2", "jrl.learners.online.shuffled_rows",
             "jax.random.uniform(key, mask.shape[:1])",
             "jax.random.uniform(jax.random.key(__import__('time').time_ns() % 10 ** 6), mask.shape[:1])",
             "tests/learners/test_ppo.py::test_lore_9_2_the_same_key_gives_the_same_bits"),
    # a sign error between scores and advantages
    Mutation("9.5", "jrl.learners.credit.penalize",
             "zero_masked(rewards, mask)", "zero_masked(-rewards, mask)",
             "tests/learners/test_ppo_controls.py::test_lore_9_5_a_reversed_reward_makes_the_score_fall"),
    # the advantage of an action is given to the one before
    Mutation("9.6", "jrl.learners.credit.generalized_advantages",
             "whiten(advantages, mask)", "jnp.roll(whiten(advantages, mask), -1, axis=1)",
             "tests/learners/test_ppo_controls.py::test_lore_9_6_a_known_optimum_is_reached_by_every_seed"),
]
