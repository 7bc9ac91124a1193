# SPDX-License-Identifier: Apache-2.0
"""Breaches of the rules that `jrl.data` and the host side of `jrl.rollout` keep."""

from __future__ import annotations

from tests.mutation_patches.base import Mutation

# fmt: off
PATCHES = [
    Mutation("1.1", "jrl.rollout.text.decode_rows",
             "_(output_tokens=rows)", "_(output_tokens=[tokenizer(text)['input_ids'] for text in outputs])",
             "tests/rollout/test_text.py::TestWithoutStops::"
             "test_lore_1_1_ids_stay_as_sampled_where_text_would_encode_otherwise"),
    Mutation("1.3", "jrl.data.batching._pad",
             "(tokens, mask)", "(tokens, tokens != pad_token_id)",
             "tests/data/test_batching.py::TestPad::test_lore_1_3_the_mask_comes_from_lengths_and_not_from_the_pad_id"),
    Mutation("1.5", "jrl.rollout.text.decode_rows",
             "[int(token) for token in row[:length]]", "[int(token) for token in row[:length + 1]]",
             "tests/rollout/test_text.py::TestWithoutStops::"
             "test_lore_1_5_everything_up_to_the_end_is_an_action_and_nothing_after"),
    Mutation("1.7", "jrl.data.demonstrations.dialogue.tokenize_dialogue",
             "index % 2 == 1", "True",
             "tests/data/demonstrations/test_dialogue.py::TestBatch::test_lore_1_7_prompts_are_context"),
    Mutation("1.8", "jrl.data.demonstrations.dialogue._text_row",
             "cut(tokens, max_length - len(prefix), tokenizer.truncation_side)",
             "[*cut(tokens, max_length - 1, tokenizer.truncation_side), tokenizer.eos_token_id]",
             "tests/data/demonstrations/test_dialogue.py::TestTruncation::test_lore_1_8_a_cut_text_teaches_no_end"),
    Mutation("1.9", "jrl.rollout.text._end_at_stop",
             "(row[:count], text[:_first_stop(text, stop_sequences)].rstrip())",
             "(row, text[:_first_stop(text, stop_sequences)].rstrip())",
             "tests/rollout/test_text.py::TestStops::test_lore_1_9_ids_lengths_and_text_share_the_cut"),
    Mutation("1.9", "jrl.rollout.rewards.to_reward_matrix",
             "length - 1", "-1",
             "tests/rollout/test_rewards.py::TestRewardMatrix::"
             "test_lore_1_9_the_score_sits_on_the_action_that_completes_the_stop_string"),
    Mutation("1.13", "jrl.data.tokenizer.cut",
             "'left'", "'right'",
             "tests/data/test_prompts.py::TestLongPrompts::test_lore_1_13_cut_on_the_side_that_is_meant_and_counted"),
    Mutation("1.13", "jrl.data.prompts.PromptSet.__init__",
             "if too_long:\n    done = f'were dropped; {len(kept)} are left' if self.num_dropped else "
             "f'were cut on the {side}'\n    warnings.warn(f'{len(too_long)} of {len(rows)} prompts "
             "have more than {room} tokens and {done} (the first is prompt {too_long[0]}, with "
             "{len(rows[too_long[0]])} tokens).', stacklevel=2)",
             "if too_long and (not self.num_dropped):\n    done = f'were dropped; {len(kept)} are "
             "left' if self.num_dropped else f'were cut on the {side}'\n    "
             "warnings.warn(f'{len(too_long)} of {len(rows)} prompts have more than {room} tokens "
             "and {done} (the first is prompt {too_long[0]}, with {len(rows[too_long[0]])} tokens).',"
             " stacklevel=2)",
             "tests/data/test_prompts.py::TestLongPrompts::"
             "test_lore_1_13_dropped_loudly_and_the_order_of_the_others_stays"),
    Mutation("9.1", "jrl.data.ordering.epoch_order",
             "[seed, epoch]", "None",
             "tests/data/test_ordering.py::test_lore_9_1_a_position_does_not_depend_on_when_it_is_asked_for"),
    Mutation("8.6", "jrl.data.offline.earned_at_end",
             "-1", "0",
             "tests/data/test_offline.py::TestBatch::"
             "test_lore_8_6_the_last_action_alone_earns_and_actions_stand_one_after_another"),
    Mutation("1.10", "jrl.data.tokenizer.begun",
             "ids if ids[:len(prefix)] == prefix else prefix + ids", "prefix + ids",
             "tests/data/preferences/test_preference_set.py::TestSeam::test_lore_1_10_bos_comes_first_and_once"),
    Mutation("1.13", "jrl.data.preferences.preference_set.PreferenceSet.__init__",
             "len(pairs) - len(self.rows)", "0",
             "tests/data/preferences/test_preference_set.py::TestTruncation::"
             "test_lore_1_13_prompts_that_leave_no_completion_are_dropped_loudly"),
    Mutation("9.1", "jrl.data.sources.streams.StreamSet.batch",
             "step - at - 1", "0",
             "tests/data/sources/test_streams.py::TestOrder::test_lore_9_1_a_resumed_run_goes_on_with_the_same_rows"),
]
