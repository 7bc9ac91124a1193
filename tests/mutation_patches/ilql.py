# SPDX-License-Identifier: Apache-2.0
"""Breaches of the rules of ILQL."""

from __future__ import annotations

from tests.mutation_patches.base import Mutation

# fmt: off
PATCHES = [
    # the larger of the two target heads
    Mutation("8.5", "jrl.learners.ilql._predictions",
             "jnp.min", "jnp.max",
             "tests/learners/test_ilql.py::test_lore_8_5_every_term_of_every_action_by_hand"),
    # the value leans to the worse actions
    Mutation("8.5", "jrl.losses.ilql.expectile_loss",
             "difference >= 0", "difference < 0",
             "tests/losses/test_ilql.py::TestIdentities::"
             "test_lore_8_5_at_one_half_the_expectile_is_half_the_squared_error_and_gives_the_mean"),
    # the Bellman target learns, too
    Mutation("8.5", "jrl.losses.ilql.bellman_targets",
             "jax.lax.stop_gradient(zero_masked(rewards + gamma * following, mask))",
             "zero_masked(rewards + gamma * following, mask)",
             "tests/losses/test_ilql.py::TestGradients::test_lore_8_5_targets_and_weights_pass_no_gradient"),
    # the weight of the likelihood learns, too
    Mutation("8.5", "jrl.losses.ilql.awac_weights",
             "jax.lax.stop_gradient(jnp.exp(jnp.minimum(beta * (target_q - values), MAX_LOG_WEIGHT)))",
             "jnp.exp(jnp.minimum(beta * (target_q - values), MAX_LOG_WEIGHT))",
             "tests/losses/test_ilql.py::TestGradients::test_lore_8_5_targets_and_weights_pass_no_gradient"),
    # Q moves towards V
    Mutation("8.5", "jrl.losses.ilql.expectile_loss",
             "jax.lax.stop_gradient(target_q)", "target_q",
             "tests/losses/test_ilql.py::TestGradients::test_lore_8_5_targets_and_weights_pass_no_gradient"),
    # Q of unseen actions is raised
    Mutation("8.5", "jrl.losses.ilql.conservative_loss",
             "-jnp.sum(q_logprobs, axis=-1)", "jnp.sum(q_logprobs, axis=-1)",
             "tests/losses/test_ilql.py::TestGradients::test_lore_8_5_the_conservative_term_lowers_unseen_actions"),
    # Q of the state's own token
    Mutation("8.5", "jrl.learners.ilql.ilql_objective",
             "targets_at(batch.inputs.tokens, batch.columns)",
             "targets_at(batch.inputs.tokens, jnp.maximum(batch.columns - 1, 0))",
             "tests/learners/test_ilql.py::TestChain::"
             "test_lore_8_5_where_cloning_is_suboptimal_the_decoded_policy_is_optimal"),
    # the targets follow every step
    Mutation("8.5", "jrl.learners.ilql.make_ilql_update.update",
             "lambda online, target: target",
             "lambda online, target: optax.incremental_update(online, target, config.alpha)",
             "tests/learners/test_ilql.py::TestTargets::test_lore_8_5_targets_move_by_syncs_alone"),
    # a sync takes what the heads were before the step
    Mutation("8.5", "jrl.learners.ilql.make_ilql_update.update",
             "train.params", "state.train.params",
             "tests/learners/test_ilql.py::TestTargets::test_lore_8_5_targets_move_by_syncs_alone"),
    # another weight than beta
    Mutation("8.5", "jrl.ops.sampling.steer",
             "beta * advantages", "jnp.sqrt(beta) * advantages",
             "tests/rollout/test_generate_ilql.py::test_lore_8_5_decoding_adds_beta_times_q_minus_v"),
    # the end of a row reads the value of what stands behind it
    Mutation("8.6", "jrl.losses.ilql.bellman_targets",
             "zero_masked(values, mask)", "values",
             "tests/losses/test_ilql.py::TestGolden::test_lore_8_6_targets_of_three_steps_end_without_bootstrapping"),
    # what is terminal has the value of padding
    Mutation("8.6", "jrl.learners.ilql.values_after",
             "jnp.where(lengths > 0, values, 0.0)", "values",
             "tests/learners/test_ilql.py::TestEpisodes::"
             "test_lore_8_6_one_turn_rows_solve_the_equations_of_the_policy_that_acted"),
    # what follows a row counts in full
    Mutation("8.6", "jrl.losses.ilql._with_what_follows",
             "gamma * after[:, None]", "after[:, None]",
             "tests/losses/test_ilql.py::TestGolden::"
             "test_lore_8_6_behind_a_row_that_goes_on_stands_the_value_of_the_next_one"),
]
