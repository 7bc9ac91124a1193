# SPDX-License-Identifier: Apache-2.0
"""Breaches of the rules that rejection fine-tuning keeps."""

from __future__ import annotations

from tests.mutation_patches.base import Mutation

# fmt: off
PATCHES = [
    # the scored text would be learned with an EOS that nobody sampled
    Mutation("1.1", "jrl.data.demonstrations.completions.CompletionSet.__init__",
             "DialogueRow([*start, *completion], [False] * len(start) + [True] * len(completion))",
             "DialogueRow([*start, *completion, 1], [False] * len(start) + [True] * (len(completion) + 1))",
             "tests/data/demonstrations/test_completions.py::"
             "test_lore_1_1_the_sampled_ids_are_learned_and_nothing_is_added"),
    # repetitions stay
    Mutation("8.7", "jrl.data.selection.distinct",
             "(int(groups[index]), *completions[index])", "(int(index),)",
             "tests/data/test_selection.py::TestSelect::test_lore_8_7_a_known_pass_table_gives_the_exact_set"),
    # one bar for all prompts: easy ones push out hard ones
    Mutation("8.7", "jrl.data.selection.score_thresholds",
             "scores[order[bounds[group]:bounds[group + 1]]]", "scores",
             "tests/data/test_selection.py::TestSelect::test_lore_8_7_the_bar_rises_with_every_improve_step"),
    # the worst of two values is learned as well
    Mutation("8.7", "jrl.data.selection.score_thresholds",
             "np.maximum(found, lowest)", "found",
             "tests/data/test_selection.py::TestSelect::test_lore_8_7_a_known_pass_table_gives_the_exact_set"),
    # the cap counts samples of all prompts together
    Mutation("8.7", "jrl.data.selection.best_of_each",
             "np.arange(len(order)) - np.searchsorted(groups[order], groups[order])", "np.arange(len(order))",
             "tests/data/test_selection.py::TestSelect::"
             "test_lore_8_7_a_cap_keeps_an_easy_prompt_from_flooding_the_set"),
    # every call of the sampler draws the same numbers
    Mutation("9.1", "jrl.rollout.collect.Collector.parts.dispatch",
             "self.sampler(params, frozen, inputs, numbers, settings, key)",
             "self.sampler(params, frozen, inputs, numbers - number * rows_of_call, settings, key)",
             "tests/trainers/test_train_rft.py::TestRound::"
             "test_lore_9_1_samples_do_not_depend_on_the_calls_they_come_from"),
    # what is learned is not the sample but the next one
    Mutation("1.1", "jrl.data.selection.select",
             "list(completions[int(index)])", "list(completions[int(index) - 1])",
             "tests/trainers/test_train_rft.py::TestRun::"
             "test_lore_1_1_exactly_the_sampled_ids_of_kept_samples_are_learned"),
]
