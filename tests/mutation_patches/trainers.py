# SPDX-License-Identifier: Apache-2.0
"""Breaches of the rules that the trainers answer for."""

from __future__ import annotations

from tests.mutation_patches.base import Mutation

# fmt: off
PATCHES = [
    Mutation("9.2", "jrl.trainers.base.Trainer.prepare",
             "jax.random.key(self.config.train.seed)", "jax.random.key(id(self) % 2 ** 31)",
             "tests/trainers/test_train_ppo.py::TestRun::test_lore_9_2_same_seed_same_metrics"),
    Mutation("9.7", "jrl.trainers.loop.run.Run.begin",
             "self.iteration == 0", "self.iteration < 0",
             "tests/trainers/test_train_ppo.py::TestRun::test_lore_9_7_the_untrained_model_is_evaluated_first"),
    # the weights of the first call for ever
    Mutation("2.9", "jrl.rollout.sampler.Sampler.__call__",
             "program(params, frozen, prompts, jnp.asarray(row_ids), knobs, key)",
             "program(*vars(self).setdefault('_w', (params, frozen)), prompts, jnp.asarray(row_ids), knobs, key)",
             "tests/rollout/test_sampler_weights.py::"
             "test_lore_2_9_after_any_leaf_changes_the_record_is_that_of_the_new_weights"),
]
