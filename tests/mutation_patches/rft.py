# SPDX-License-Identifier: Apache-2.0
"""Breaches of the rules that rejection fine-tuning keeps."""

from tests.mutation_patches.base import Mutation

SELECTION = "jrl/data/selection.py"
SELECT = "tests/data/test_selection.py::TestSelect::"

PATCHES = [
    Mutation(  # the scored text would be learned with an EOS that nobody sampled
        rule="1.1",
        file="jrl/data/completions.py",
        old="DialogueRow([*start, *completion], [False] * len(start) + [True] * len(completion))",
        new="DialogueRow([*start, *completion, 1], [False] * len(start) + [True] * (len(completion) + 1))",
        test="tests/data/test_completions.py::test_lore_1_1_the_sampled_ids_are_learned_and_nothing_is_added",
    ),
    Mutation(  # repetitions stay
        rule="8.7",
        file=SELECTION,
        old="best.setdefault((int(groups[index]), *completions[index]), int(index))",
        new="best.setdefault((int(index),), int(index))",
        test=SELECT + "test_lore_8_7_a_known_pass_table_gives_the_exact_set",
    ),
    Mutation(  # one bar for all prompts: easy ones push out hard ones
        rule="8.7",
        file=SELECTION,
        old="found[:, group] = np.quantile(scores[order[bounds[group] : bounds[group + 1]]], percentiles)",
        new="found[:, group] = np.quantile(scores, percentiles)",
        test=SELECT + "test_lore_8_7_the_bar_rises_with_every_improve_step",
    ),
    Mutation(  # the worst of two values is learned as well
        rule="8.7",
        file=SELECTION,
        old="return np.minimum(np.maximum(found, lowest), highest)",
        new="return np.minimum(found, highest)",
        test=SELECT + "test_lore_8_7_a_known_pass_table_gives_the_exact_set",
    ),
    Mutation(  # the cap counts samples of all prompts together
        rule="8.7",
        file=SELECTION,
        old="places = np.arange(len(order)) - np.searchsorted(groups[order], groups[order])",
        new="places = np.arange(len(order))",
        test=SELECT + "test_lore_8_7_a_cap_keeps_an_easy_prompt_from_flooding_the_set",
    ),
    Mutation(  # every call of the sampler draws the same numbers
        rule="9.1",
        file="jrl/trainers/completing.py",
        old="return batch, self.sampler(params, frozen, inputs, numbers, settings, key)",
        new="return batch, self.sampler(params, frozen, inputs, numbers - start, settings, key)",
        test="tests/trainers/test_train_rft.py::TestRound::"
        "test_lore_9_1_samples_do_not_depend_on_the_calls_they_come_from",
    ),
    Mutation(  # what is learned is not the sample but the next one
        rule="1.1",
        file=SELECTION,
        old="completions=[list(completions[int(index)]) for index in chosen],",
        new="completions=[list(completions[int(index) - 1]) for index in chosen],",
        test="tests/trainers/test_train_rft.py::TestRun::"
        "test_lore_1_1_exactly_the_sampled_ids_of_kept_samples_are_learned",
    ),
]
