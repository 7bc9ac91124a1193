# SPDX-License-Identifier: Apache-2.0
import pytest

from jrl.data.demonstrations.classic import completion_mask, template_ids
from tests.tiny import tiny_tokenizer

ASK, ANSWER = [91, 92], [93]


def flags(text):
    return [letter == "1" for letter in text]


class TestCompletionMask:
    @pytest.mark.parametrize(
        ("tokens", "expected"),
        [
            ([5, 93, 6, 7], "0011"),
            # Behind the last one alone.
            ([5, 93, 6, 93, 7], "00001"),
            ([93, 6], "01"),
            ([5, 6], "00"),
        ],
    )
    def test_without_instructions(self, tokens, expected):
        assert completion_mask(tokens, ANSWER) == flags(expected)

    @pytest.mark.parametrize(
        ("tokens", "expected"),
        [
            ([91, 92, 5, 93, 6, 7, 91, 92, 5, 93, 6], "00001100001"),
            # What stands before the first instruction belongs to it.
            ([5, 91, 92, 5, 93, 6], "000001"),
            # The last instruction has no answer.
            ([91, 92, 5, 93, 6, 91, 92, 5], "00001000"),
            # An answer comes first.
            ([5, 93, 6, 91, 92, 5, 93, 7], "00100001"),
            # Two questions in a row: the second one has no answer of its own.
            ([91, 92, 5, 91, 92, 5, 93, 7], "00000000"),
            ([91, 92, 5], "000"),
            ([5, 93, 6], "000"),
        ],
    )
    def test_with_instructions(self, tokens, expected):
        assert completion_mask(tokens, ANSWER, ASK) == flags(expected)


class TestTemplateIds:
    def test_text_and_ids(self):
        assert template_ids(tiny_tokenizer(), "the") == tiny_tokenizer()("the")["input_ids"]
        assert template_ids(tiny_tokenizer(), (3, 4)) == [3, 4]

    def test_nothing_is_refused(self):
        with pytest.raises(ValueError, match="at least one token, got ''"):
            template_ids(tiny_tokenizer(), "")
