# SPDX-License-Identifier: Apache-2.0
"""Breaches of the rules that `jrl.data` and the host side of `jrl.rollout` keep."""

from tests.mutation_patches.base import Mutation

TEXT = "jrl/rollout/text.py"
STOPS = "tests/rollout/test_text.py::TestStops::"
ROWS = "tests/rollout/test_text.py::TestWithoutStops::"

PATCHES = [
    Mutation(
        rule="1.1",
        file=TEXT,
        old="        output_tokens=rows,",
        new="        output_tokens=[tokenizer(text)['input_ids'] for text in outputs],",
        test=ROWS + "test_lore_1_1_ids_stay_as_sampled_where_text_would_encode_otherwise",
    ),
    Mutation(
        rule="1.3",
        file="jrl/data/batching.py",
        old="    return tokens, mask",
        new="    return tokens, tokens != pad_token_id",
        test="tests/data/test_batching.py::TestPad::test_lore_1_3_the_mask_comes_from_lengths_and_not_from_the_pad_id",
    ),
    Mutation(
        rule="1.5",
        file=TEXT,
        old="[int(token) for token in row[:length]]",
        new="[int(token) for token in row[: length + 1]]",
        test=ROWS + "test_lore_1_5_everything_up_to_the_end_is_an_action_and_nothing_after",
    ),
    Mutation(
        rule="1.7",
        file="jrl/data/dialogue.py",
        old="learned = [index % 2 == 1 for",
        new="learned = [True for",
        test="tests/data/test_dialogue.py::TestBatch::test_lore_1_7_prompts_are_context",
    ),
    Mutation(
        rule="1.8",
        file="jrl/data/dialogue.py",
        old="    kept = cut(tokens, max_length - len(bos_ids), tokenizer.truncation_side)",
        new="    kept = [*cut(tokens, max_length - 1, tokenizer.truncation_side), tokenizer.eos_token_id]",
        test="tests/data/test_dialogue.py::TestTruncation::test_lore_1_8_a_cut_text_teaches_no_end",
    ),
    Mutation(
        rule="1.9",
        file=TEXT,
        old="    return row[:count], text[",
        new="    return row, text[",
        test=STOPS + "test_lore_1_9_ids_lengths_and_text_share_the_cut",
    ),
    Mutation(
        rule="1.9",
        file="jrl/rollout/rewards.py",
        old="scores[row, length - 1] = reward",
        new="scores[row, -1] = reward",
        test="tests/rollout/test_rewards.py::TestScoreMatrix::"
        "test_lore_1_9_the_score_sits_on_the_action_that_completes_the_stop_string",
    ),
    Mutation(
        rule="1.13",
        file="jrl/data/tokenizer.py",
        old='if side == "left" else row[:max_length]',
        new='if side == "right" else row[:max_length]',
        test="tests/data/test_prompts.py::TestLongPrompts::"
        "test_lore_1_13_cut_on_the_side_that_is_meant_and_counted",
    ),
    Mutation(
        rule="1.13",
        file="jrl/data/prompts.py",
        old="        if too_long:\n            done",
        new="        if too_long and not self.num_dropped:\n            done",
        test="tests/data/test_prompts.py::TestLongPrompts::"
        "test_lore_1_13_dropped_loudly_and_the_order_of_the_others_stays",
    ),
    Mutation(
        rule="9.1",
        file="jrl/data/ordering.py",
        old="np.random.SeedSequence([seed, epoch])",
        new="np.random.SeedSequence(None)",
        test="tests/data/test_ordering.py::test_lore_9_1_a_position_does_not_depend_on_when_it_is_asked_for",
    ),
    Mutation(
        rule="8.6",
        file="jrl/data/offline.py",
        old="last = np.maximum(mask.sum(axis=1) - 1, 0)",
        new="last = np.zeros(batch_size, np.int32)",
        test="tests/data/test_offline.py::TestBatch::"
        "test_lore_8_6_the_last_action_alone_earns_and_actions_stand_one_after_another",
    ),
    Mutation(
        rule="1.10",
        file="jrl/data/preference_tokens.py",
        old="return ids if ids[: len(prefix)] == prefix else prefix + ids",
        new="return prefix + ids",
        test="tests/data/test_preferences.py::TestSeam::test_lore_1_10_bos_comes_first_and_once",
    ),
    Mutation(
        rule="1.13",
        file="jrl/data/preferences.py",
        old="self.num_dropped = len(pairs) - len(self.rows)",
        new="self.num_dropped = 0",
        test=(
            "tests/data/test_preferences.py::TestTruncation::"
            "test_lore_1_13_prompts_that_leave_no_completion_are_dropped_loudly"
        ),
    ),
    Mutation(
        rule="9.1",
        file="jrl/data/streaming.py",
        old="range(step - at - 1)",
        new="range(0)",
        test="tests/data/test_streaming.py::TestOrder::test_lore_9_1_a_resumed_run_goes_on_with_the_same_rows",
    ),
]
