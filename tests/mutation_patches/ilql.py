# SPDX-License-Identifier: Apache-2.0
"""Breaches of the rules of ILQL."""

from __future__ import annotations

from tests.mutation_patches.base import Mutation

LOSS = "jrl/losses/ilql.py"
LEARNER = "jrl/learners/ilql.py"
SAMPLING = "jrl/ops/sampling.py"

PATCHES = [
    Mutation(  # the larger of the two target heads
        rule="8.5",
        file=LEARNER,
        old="target_q=jnp.min(",
        new="target_q=jnp.max(",
        test="tests/learners/test_ilql.py::test_lore_8_5_every_term_of_every_action_by_hand",
    ),
    Mutation(  # the value leans to the worse actions
        rule="8.5",
        file=LOSS,
        old="jnp.where(difference >= 0, expectile, 1 - expectile)",
        new="jnp.where(difference < 0, expectile, 1 - expectile)",
        test="tests/losses/test_ilql.py::TestIdentities::"
        "test_lore_8_5_at_one_half_the_expectile_is_half_the_squared_error_and_gives_the_mean",
    ),
    Mutation(  # the Bellman target learns, too
        rule="8.5",
        file=LOSS,
        old="return jax.lax.stop_gradient(zero_masked(rewards + gamma * next_values, mask))",
        new="return zero_masked(rewards + gamma * next_values, mask)",
        test="tests/losses/test_ilql.py::TestGradients::test_lore_8_5_targets_and_weights_pass_no_gradient",
    ),
    Mutation(  # the weight of the likelihood learns, too
        rule="8.5",
        file=LOSS,
        old="return jax.lax.stop_gradient(jnp.exp(jnp.minimum(",
        new="return (jnp.exp(jnp.minimum(",
        test="tests/losses/test_ilql.py::TestGradients::test_lore_8_5_targets_and_weights_pass_no_gradient",
    ),
    Mutation(  # Q moves towards V
        rule="8.5",
        file=LOSS,
        old="difference = jax.lax.stop_gradient(target_q) - values",
        new="difference = target_q - values",
        test="tests/losses/test_ilql.py::TestGradients::test_lore_8_5_targets_and_weights_pass_no_gradient",
    ),
    Mutation(  # Q of unseen actions is raised
        rule="8.5",
        file=LOSS,
        old="return -jnp.sum(q_logprobs, axis=-1)",
        new="return jnp.sum(q_logprobs, axis=-1)",
        test="tests/losses/test_ilql.py::TestGradients::"
        "test_lore_8_5_the_conservative_term_lowers_unseen_actions",
    ),
    Mutation(  # Q of the state's own token
        rule="8.5",
        file=LEARNER,
        old="actions = targets_at(batch.inputs.tokens, batch.columns)",
        new="actions = targets_at(batch.inputs.tokens, jnp.maximum(batch.columns - 1, 0))",
        test="tests/learners/test_ilql.py::TestChain::"
        "test_lore_8_5_where_cloning_is_suboptimal_the_decoded_policy_is_optimal",
    ),
    Mutation(  # the targets follow every step
        rule="8.5",
        file=LEARNER,
        old="            lambda online, target: target,\n",
        new="            lambda online, target: optax.incremental_update(online, target, config.alpha),\n",
        test="tests/learners/test_ilql.py::TestTargets::test_lore_8_5_targets_move_by_syncs_alone",
    ),
    Mutation(  # a sync takes what the heads were before the step
        rule="8.5",
        file=LEARNER,
        old='            train.params["q_heads"],\n',
        new='            state.train.params["q_heads"],\n',
        test="tests/learners/test_ilql.py::TestTargets::test_lore_8_5_targets_move_by_syncs_alone",
    ),
    Mutation(  # another weight than beta
        rule="8.5",
        file=SAMPLING,
        old="return logits + beta * advantages",
        new="return logits + jnp.sqrt(beta) * advantages",
        test="tests/rollout/test_generate_ilql.py::test_lore_8_5_decoding_adds_beta_times_q_minus_v",
    ),
    Mutation(  # the end of a row reads the value of what stands behind it
        rule="8.6",
        file=LOSS,
        old="next_values = jnp.pad(zero_masked(values, mask)[:, 1:], ((0, 0), (0, 1)))",
        new="next_values = jnp.pad(values[:, 1:], ((0, 0), (0, 1)))",
        test="tests/losses/test_ilql.py::TestGolden::"
        "test_lore_8_6_targets_of_three_steps_end_without_bootstrapping",
    ),
]
