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
]
