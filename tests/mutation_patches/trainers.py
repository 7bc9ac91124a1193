# SPDX-License-Identifier: Apache-2.0
"""Breaches of the rules that the trainers answer for."""

from tests.mutation_patches.base import Mutation

_RUN = "tests/trainers/test_train_ppo.py::TestRun"

PATCHES = [
    Mutation(
        rule="9.2",
        file="jrl/trainers/base.py",
        old="self.root_key = jax.random.key(self.config.train.seed)",
        new="self.root_key = jax.random.key(id(self) % 2**31)",
        test=f"{_RUN}::test_lore_9_2_same_seed_same_metrics",
    ),
    Mutation(
        rule="9.7",
        file="jrl/trainers/ppo.py",
        old="            if run.iteration == 0:\n                run.evaluate()",
        new="            if run.iteration < 0:\n                run.evaluate()",
        test=f"{_RUN}::test_lore_9_7_the_untrained_model_is_evaluated_first",
    ),
    Mutation(  # the weights of the first call for ever
        rule="2.9",
        file="jrl/trainers/generation.py",
        old="return program(params, frozen, prompts, jnp.asarray(row_ids), knobs, key)",
        new='return program(*vars(self).setdefault("_w", (params, frozen)), prompts, jnp.asarray(row_ids), knobs, key)',
        test="tests/rollout/test_sampler_weights.py::"
        "test_lore_2_9_after_any_leaf_changes_the_record_is_that_of_the_new_weights",
    ),
]
