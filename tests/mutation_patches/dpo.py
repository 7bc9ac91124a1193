# SPDX-License-Identifier: Apache-2.0
"""Breaches of the rules of DPO."""

from __future__ import annotations

from tests.mutation_patches.base import Mutation

# fmt: off
PATCHES = [
    # means over tokens instead of sums: another method
    Mutation("8.1", "jrl.losses.dpo_pairs.completion_logprobs",
             "masked_sum(logprobs, mask, axis=1)", "masked_mean(logprobs, mask, axis=1)",
             "tests/losses/test_dpo.py::TestIdentities::"
             "test_lore_8_1_log_probabilities_are_summed_over_the_completion_alone"),
    # the prompt is counted, too
    Mutation("8.1", "jrl.losses.dpo_pairs.completion_logprobs",
             "masked_sum(logprobs, mask, axis=1)", "jnp.sum(logprobs, axis=1)",
             "tests/losses/test_dpo.py::TestIdentities::"
             "test_lore_8_1_log_probabilities_are_summed_over_the_completion_alone"),
    # the reference's log-probabilities are left out where they belong
    Mutation("8.1", "jrl.losses.dpo.dpo_loss",
             "pairs_of(*map(_without_reference, (chosen, rejected))) if reference_free else compared",
             "pairs_of(*map(_without_reference, (chosen, rejected))) if not reference_free else compared",
             "tests/losses/test_dpo.py::TestIdentities::"
             "test_lore_8_1_at_the_reference_the_loss_is_log_two_and_both_rewards_are_zero"),
    # padding of the window is counted
    Mutation("8.1", "jrl.losses.dpo_pairs.completion_logprobs",
             "mask & shared", "shared",
             "tests/losses/test_dpo.py::TestIdentities::test_lore_8_1_padding_on_either_side_changes_nothing"),
    # the reference at another temperature than the policy
    Mutation("8.2", "jrl.learners.dpo.reference_logprobs.score",
             "found.logprobs", "1.01 * found.logprobs",
             "tests/learners/test_dpo.py::TestReference::"
             "test_lore_8_2_its_logprobs_are_those_that_the_objective_reads"),
    # a cache that does not know which tokens it is of
    Mutation("8.2", "jrl.trainers.dpo.DPOTrainer.score_reference",
             "samples.sha256()", "''",
             "tests/trainers/test_train_dpo.py::test_lore_8_2_other_tokens_or_another_dtype_are_scored_anew"),
    # a cache that does not know whose numbers it holds
    Mutation("8.2", "jrl.trainers.dpo.DPOTrainer.score_reference",
             "self.frozen_sha256()", "''",
             "tests/trainers/test_train_dpo.py::test_lore_8_2_other_weights_are_scored_anew"),
    # a cache that does not know how it was computed
    Mutation("8.2", "jrl.trainers.dpo.DPOTrainer.score_reference",
             "self.config.train.compute_dtype", "''",
             "tests/trainers/test_train_dpo.py::test_lore_8_2_other_tokens_or_another_dtype_are_scored_anew"),
    # the chosen side is not looked at
    Mutation("8.3", "jrl.trainers.loggers.watch",
             "(Test('rewards/chosen', below=0.0), Test('rewards/margins', above=0.0))",
             "(Test('rewards/margins', above=0.0),)",
             "tests/trainers/test_train_dpo.py::TestDisplacement::"
             "test_lore_8_3_nothing_is_said_of_chosen_ones_that_rise_or_of_no_margin"),
    # the metric counts margins alone
    Mutation("8.3", "jrl.losses.dpo._pair_metrics",
             "(chosen > rejected) & (chosen < 0)", "chosen > rejected",
             "tests/losses/test_dpo.py::TestIdentities::test_lore_8_3_displaced_pairs_are_counted"),
]
