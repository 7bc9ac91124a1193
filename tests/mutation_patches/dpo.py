# SPDX-License-Identifier: Apache-2.0
"""Breaches of the rules of DPO."""

from __future__ import annotations

from tests.mutation_patches.base import Mutation

LOSS = "jrl/losses/dpo.py"
PAIRS = "jrl/losses/dpo_pairs.py"
LEARNER = "jrl/learners/dpo.py"
TRAINER = "jrl/trainers/dpo.py"
WATCH = "jrl/trainers/dpo_watch.py"

PATCHES = [
    Mutation(  # means over tokens instead of sums: another method
        rule="8.1",
        file=PAIRS,
        old="        return masked_sum(logprobs, mask, axis=1)\n",
        new="        return masked_mean(logprobs, mask, axis=1)\n",
        test="tests/losses/test_dpo.py::TestIdentities::"
        "test_lore_8_1_log_probabilities_are_summed_over_the_completion_alone",
    ),
    Mutation(  # the prompt is counted, too
        rule="8.1",
        file=PAIRS,
        old="        return masked_sum(logprobs, mask, axis=1)\n",
        new="        return jnp.sum(logprobs, axis=1)\n",
        test="tests/losses/test_dpo.py::TestIdentities::"
        "test_lore_8_1_log_probabilities_are_summed_over_the_completion_alone",
    ),
    Mutation(  # the reference's log-probabilities are left out where they belong
        rule="8.1",
        file=LOSS,
        old="if reference_free else compared",
        new="if not reference_free else compared",
        test="tests/losses/test_dpo.py::TestIdentities::"
        "test_lore_8_1_at_the_reference_the_loss_is_log_two_and_both_rewards_are_zero",
    ),
    Mutation(  # padding of the window is counted
        rule="8.1",
        file=PAIRS,
        old="return masked_sum(logprobs, mask & shared, axis=1) + ld_alpha * masked_sum(",
        new="return masked_sum(logprobs, shared, axis=1) + ld_alpha * masked_sum(",
        test="tests/losses/test_dpo.py::TestIdentities::test_lore_8_1_padding_on_either_side_changes_nothing",
    ),
    Mutation(  # the reference at another temperature than the policy
        rule="8.2",
        file=LEARNER,
        old="temperature=1.0,",
        new="temperature=1.01,",
        test="tests/learners/test_dpo.py::TestReference::"
        "test_lore_8_2_its_logprobs_are_those_that_the_objective_reads",
    ),
    Mutation(  # a cache that does not know which tokens it is of
        rule="8.2",
        file=TRAINER,
        old="            samples.sha256(),\n",
        new='            "",\n',
        test="tests/trainers/test_train_dpo.py::test_lore_8_2_other_tokens_or_another_dtype_are_scored_anew",
    ),
    Mutation(  # a cache that does not know whose numbers it holds
        rule="8.2",
        file=TRAINER,
        old="            self.frozen_sha256(),\n",
        new='            "",\n',
        test="tests/trainers/test_train_dpo.py::test_lore_8_2_other_weights_are_scored_anew",
    ),
    Mutation(  # a cache that does not know how it was computed
        rule="8.2",
        file=TRAINER,
        old="            self.config.train.compute_dtype,\n",
        new='            "",\n',
        test="tests/trainers/test_train_dpo.py::test_lore_8_2_other_tokens_or_another_dtype_are_scored_anew",
    ),
    Mutation(  # the chosen side is not looked at
        rule="8.3",
        file=WATCH,
        old="if chosen < 0 < margin else 0",
        new="if 0 < margin else 0",
        test="tests/trainers/test_train_dpo.py::TestDisplacement::"
        "test_lore_8_3_nothing_is_said_of_chosen_ones_that_rise_or_of_no_margin",
    ),
    Mutation(  # the metric counts margins alone
        rule="8.3",
        file=LOSS,
        old="(chosen > rejected) & (chosen < 0)",
        new="(chosen > rejected)",
        test="tests/losses/test_dpo.py::TestIdentities::test_lore_8_3_displaced_pairs_are_counted",
    ),
]
