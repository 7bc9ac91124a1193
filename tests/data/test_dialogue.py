# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest

from jrl.data.dialogue import DialogueSet, tokenize_dialogue


class Letters:
    """a..u are 0..20; EOS = BOS = 21; pad = 22."""

    bos_token_id = eos_token_id = 21
    pad_token_id = 22

    def __init__(self, truncation_side="right"):
        self.truncation_side = truncation_side

    def __call__(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [ord(char) - ord("a") for char in text]}


def dialogue(messages, max_length=11, side="right"):
    found = tokenize_dialogue(messages, Letters(side), max_length=max_length)
    return [(message.tokens, message.is_output) for message in found]


def dialogue_set(samples, max_length=11):
    return DialogueSet(samples, Letters(), max_length=max_length, seed=0)


class TestTokenizeDialogue:
    def test_golden(self):
        assert dialogue(["b", "dna"]) == [([1], False), ([3, 13, 0, 21], True)]

    def test_eos_is_not_doubled(self):
        tokenizer = Letters()
        tokenizer.eos_token_id = 0  # "a": the last output ends by itself
        found = tokenize_dialogue(["b", "dna"], tokenizer, max_length=11)
        assert [message.tokens for message in found] == [[1], [3, 13, 0]]

    def test_truncation(self):
        assert dialogue(["b", "dna"], 4) == [([1], False), ([3, 13, 0], True)]
        assert dialogue(["c", "ek"], 4, "left") == [([2], False), ([4, 10, 21], True)]
        assert dialogue(["c", "ek"], 3, "left") == [([21], False), ([10, 21], True)]

    def test_turns_end_without_eos_but_the_last(self):
        found = dialogue(["c", "ek", "j", "na"])
        assert found == [([2], False), ([4, 10], True), ([9], False), ([13, 0, 21], True)]

    def test_an_output_in_front_is_predicted_from_bos(self):
        assert dialogue(["", "dna"]) == [([21], False), ([3, 13, 0, 21], True)]
        assert dialogue(["", "dna"], 4) == [([21], False), ([3, 13, 0], True)]

    @pytest.mark.parametrize("messages", [[], ["a"], ["a", "b", "c"]])
    def test_odd_numbers_of_messages_are_refused(self, messages):
        with pytest.raises(ValueError, match="even number"):
            dialogue(messages)


class TestDialogueSet:
    def by_length(self, samples, size):
        batch = dialogue_set(samples).batch(0, size)
        order = np.argsort(batch.inputs.attention_mask.sum(axis=1), kind="stable")
        return batch.inputs.tokens[order], batch.inputs.attention_mask[order], batch.mask[order]

    def test_lore_1_7_only_outputs_are_targets(self):
        tokens, attention, mask = self.by_length([["b", "da"], ["c", "ekja"]], 2)
        assert tokens[:, :6].tolist() == [[1, 3, 0, 21, 22, 22], [2, 4, 10, 9, 0, 21]]
        assert attention.sum(axis=1).tolist() == [4, 6]
        # Window position t is the action at column t + 1.
        assert mask[:, :6].astype(int).tolist() == [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0]]

    def test_strings_are_all_target_and_get_no_eos(self):
        tokens, _, mask = self.by_length(["bda"], 1)
        assert tokens[0, :4].tolist() == [1, 3, 0, 22]
        assert mask[0].sum() == 2

    def test_lore_1_7_prompts_in_the_middle_are_context(self):
        batch = dialogue_set([["c", "ek", "j", "na"]]).batch(0, 1)
        assert batch.mask[0, :7].astype(int).tolist() == [1, 1, 0, 1, 1, 1, 0]
        assert batch.mask.shape[1] == batch.inputs.tokens.shape[1] - 1
        assert batch.starts.tolist() == [0]

    def test_lore_1_12_a_short_last_batch_is_filled_with_empty_rows(self):
        samples = dialogue_set([["a", "b"], ["a", "c"], ["a", "d"]])
        first, last = samples.batch(0, 2), samples.batch(1, 2)
        assert first.mask.any(axis=1).tolist() == [True, True]
        assert last.mask.any(axis=1).tolist() == [True, False]
        assert last.inputs.attention_mask.any(axis=1).tolist() == [True, False]
        seen = sorted([*first.inputs.tokens[:, 1], last.inputs.tokens[0, 1]])
        assert seen == [1, 2, 3]

    def test_a_batch_is_a_function_of_its_number(self):
        samples = [["a", char] for char in "bcdefghij"]
        first, second = dialogue_set(samples), dialogue_set(samples)
        first.batch(0, 4)
        np.testing.assert_array_equal(first.batch(5, 4).inputs.tokens, second.batch(5, 4).inputs.tokens)
        epochs = [
            np.concatenate([first.batch(3 * e + i, 3).inputs.tokens[:, 1] for i in range(3)]) for e in (0, 1)
        ]
        assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(1, 10))
        assert epochs[0].tolist() != epochs[1].tolist()

    def test_samples_without_a_target_are_left_out_and_counted(self):
        with pytest.warns(UserWarning, match="1 of 2 samples leave no target within 3 tokens"):
            assert len(dialogue_set([["abcd", "e"], ["a", "e"]], max_length=3)) == 1
        with pytest.raises(ValueError, match="must leave a target"):
            dialogue_set([["abcd", "e"]], max_length=3)

    def test_errors_name_the_sample(self):
        with pytest.raises(ValueError, match="sample 1: a dialogue must"):
            dialogue_set([["a", "b"], ["a", "b", "c"]])
