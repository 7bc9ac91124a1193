# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import warnings

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from jrl.data.demonstrations.demonstration_set import DemonstrationFormat, DemonstrationSet
from tests.data.chat.chat_templates import MARKED, PLAIN, THINKING, assistant, chat_tokenizer, user
from tests.tiny import EOS_ID, PAD_ID

TOKENIZER = chat_tokenizer()


def row_format(tokenizer=TOKENIZER, **options):
    return DemonstrationFormat(**{"tokenizer": tokenizer, "max_length": 64} | options)


def ids(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def encoded(record, tokenizer=TOKENIZER, **options):
    """(text of all tokens, text of those that are learned)."""
    row = row_format(tokenizer, **options).encode(record, 0)
    learned = [token for token, flag in zip(row.tokens, row.learned, strict=True) if flag]
    return tokenizer.decode(row.tokens), tokenizer.decode(learned)


DIALOGUE = {"messages": [user("hi"), assistant("yes"), user("why"), assistant("so")]}
ANSWER = {"prompt": [user("hi")], "completion": [assistant("yes")]}


class TestTexts:
    def test_a_text_is_learned_whole_and_ends(self):
        assert encoded({"text": "abc"}) == ("abc<eos>", "abc<eos>")
        assert encoded("abc") == encoded({"text": "abc"}) == encoded({"words": "abc"}, text_field="words")

    def test_lore_1_4_eos_is_there_once(self):
        assert encoded({"text": "abc<eos>"}) == ("abc<eos>", "abc<eos>")
        assert encoded({"prompt": "ab", "completion": "c<eos>"}) == ("abc<eos>", "c<eos>")
        assert encoded({"text": "abc"}, append_eos=False) == ("abc", "abc")

    def test_bos_is_context_and_there_once(self):
        tokenizer = chat_tokenizer()
        processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
        tokenizer.backend_tokenizer.post_processor = processor
        assert encoded({"text": "abc"}, tokenizer) == ("<s>abc<eos>", "abc<eos>")
        assert encoded({"text": "<s>abc"}, tokenizer)[0] == "<s>abc<eos>"
        assert encoded({"prompt": "ab", "completion": "c"}, tokenizer) == ("<s>abc<eos>", "c<eos>")

    @pytest.mark.parametrize(
        ("completion_only", "learned"), [(None, "cd<eos>"), (True, "cd<eos>"), (False, "abcd<eos>")]
    )
    def test_lore_1_7_prompts_are_context_unless_asked(self, completion_only, learned):
        record = {"prompt": "ab", "completion": "cd"}
        assert encoded(record, completion_only_loss=completion_only) == ("abcd<eos>", learned)

    def test_an_empty_prompt_begins_with_bos(self):
        assert encoded({"prompt": "", "completion": "cd"}) == ("<s>cd<eos>", "cd<eos>")

    def test_a_formatting_function_replaces_columns(self):
        def joined(record):
            return record["a"] + record["b"]

        assert encoded({"a": "x", "b": "y", "text": "no"}, formatting_fn=joined) == ("xy<eos>", "xy<eos>")

    def test_lore_1_10_the_prompts_ids_are_those_that_sampling_starts_from(self):
        # "t" + "h" would be the one token "th", which no sampler can write after "t".
        found = DemonstrationSet.__new__(DemonstrationSet)
        with pytest.warns(
            UserWarning, match="1 of 2 samples would have a token that spans prompt and completion"
        ):
            found.__init__(
                [{"prompt": "t", "completion": "he"}, {"prompt": "a", "completion": "b"}],
                row_format(),
                seed=0,
            )
        assert found.rows[0].tokens == [*ids("t"), *ids("h"), *ids("e"), EOS_ID]
        assert found.rows[0].learned == [False, True, True, True]


class TestDialogues:
    def test_all_of_it(self):
        text = "<|start|>user:hi<|end|> <|start|>assistant:yes<|end|> "
        assert encoded({"messages": ANSWER["prompt"] + ANSWER["completion"]}) == (text, text)

    def test_no_eos_is_appended(self):
        assert EOS_ID not in row_format().encode(DIALOGUE, 0).tokens

    @pytest.mark.parametrize("template", [PLAIN, MARKED])
    def test_assistants_only(self, template):
        learned = encoded(DIALOGUE, chat_tokenizer(template), assistant_only_loss=True)[1]
        assert learned == "yes<|end|>so<|end|>"

    def test_completions_only(self):
        assert encoded(ANSWER)[1] == "yes<|end|>"
        assert encoded(ANSWER, completion_only_loss=False)[1].startswith("<|start|>user:hi")

    def test_both_masks_hold(self):
        record = {
            "prompt": [user("hi"), assistant("yes"), user("why")],
            "completion": [assistant("so"), {"role": "tool", "content": "7"}, assistant("ok")],
        }
        assert encoded(record, assistant_only_loss=True, max_length=99)[1] == "so<|end|>ok<|end|>"
        assert "tool:7" in encoded(record, max_length=99)[1]

    def test_shared_gpt(self):
        shared = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]
        assert encoded({"conversations": shared}) == encoded({"messages": [user("hi"), assistant("yes")]})

    def test_variables_of_the_template_come_from_columns(self):
        record = ANSWER | {"chat_template_kwargs": {"think": True}}
        tokenizer = chat_tokenizer(THINKING)
        assert encoded(record, tokenizer)[0].endswith("<|start|>assistant:<think>yes<|end|> ")


class TestTokens:
    def test_ids_and_masks_are_taken_as_they_are(self):
        row = row_format().encode({"input_ids": [5, 6, 7, 8], "completion_mask": [0, 0, 1, 1]}, 0)
        assert row == ([5, 6, 7, 8], [False, False, True, True])
        row = row_format().encode({"input_ids": [5, 6, 7], "labels": [-100, 6, -100]}, 0)
        assert row.learned == [False, True, False]
        padded = {"input_ids": [PAD_ID, 5, 6, PAD_ID], "attention_mask": [0, 1, 1, 0]}
        assert row_format().encode(padded, 0) == ([5, 6], [True, True])
        both = {"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1], "assistant_masks": [1, 0, 1]}
        assert row_format().encode(both, 0).learned == [False, False, True]


class TestLimits:
    def test_lore_1_13_cut_after_masking_and_counted(self):
        records = [{"prompt": "abcdef", "completion": "g"}, {"text": "abcdefgh"}, {"text": "ab"}]
        with pytest.warns(UserWarning) as seen:
            found = DemonstrationSet(records, row_format(max_length=4), seed=0)
        assert (len(found), found.kept, found.num_truncated, found.num_dropped) == (2, [1, 2], 2, 1)
        assert [found.rows[0].tokens, found.rows[0].learned] == [ids("abcd"), [True] * 4]
        texts = [str(one.message) for one in seen]
        assert "2 of 3 samples have more than 4 tokens and were cut on the right" in texts[0]
        assert "1 of 3 samples hold nothing to learn from and were dropped" in texts[1]

    def test_left_truncation_keeps_the_end(self):
        tokenizer = chat_tokenizer(truncation_side="left")
        row = row_format(tokenizer, max_length=3).encode({"prompt": "abcd", "completion": "e"}, 0)
        assert row == ([*ids("de"), EOS_ID], [False, True, True])

    def test_without_a_limit(self):
        assert len(row_format(max_length=None).encode({"text": "a" * 500}, 0).tokens) == 501

    def test_batches(self):
        found = DemonstrationSet(
            [{"text": "abc"}, {"prompt": "a", "completion": "bcd"}], row_format(), seed=0
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            batch = found.batch(0, 2)
        assert batch.inputs.tokens.shape == (2, 8) and batch.mask.sum() == 3 + 4
        streamed = row_format().collate(found.rows, np.array([True, False]))
        assert streamed.mask.sum() == 3


@pytest.mark.parametrize(
    ("records", "options", "message"),
    [
        ([{"text": "a"}, {"body": "b"}], {}, r"row 1 needs the column 'text', .* it has \['body'\]"),
        ([{"text": "a"}, {"text": ""}], {}, "'text' of row 1 must be a text, got an empty text"),
        ([{"prompt": "a", "completion": ""}], {}, "`completion` of row 0 is empty; columns:"),
        (
            [{"prompt": [user("a")], "completion": [assistant("")]}],
            {},
            "`completion` of row 0 is empty; columns:",
        ),
        (
            [{"a": "b"}],
            {"formatting_fn": lambda row: row["c"]},
            r"failed on row 0 with KeyError: 'c'; columns: \['a'\]",
        ),
        ([{"text": 3}], {}, "'text' of row 0 must be a text, got int"),
        ([{"text": "a"}, 3], {}, "row 1 must be a mapping from columns to values, or a text, got int"),
        ([ANSWER | {"prompt": "hi"}], {}, "`prompt` and `completion` of row 0 must both be texts"),
        ([{"text": "a"}], {"completion_only_loss": True}, r"needs the columns .* row 0 has \['text'\]"),
        (
            [{"text": "a"}],
            {"assistant_only_loss": True},
            r"needs messages with roles, row 0 has texts in \['text'\]",
        ),
        (
            [DIALOGUE, {"messages": [user("hi")]}],
            {"assistant_only_loss": True},
            "row 1.* no token is an assistant's",
        ),
        ([{"input_ids": [1, 2], "labels": [1]}], {}, "`labels` of row 0 must have one entry for each of 2"),
        (
            [{"input_ids": [5]}, {"input_ids": [5, -100]}],
            {},
            "`input_ids` of row 1 must be ids of the tokenizer",
        ),
        ([{"input_ids": [5, 999]}], {}, "`input_ids` of row 0 must be ids .* got 999"),
        ([{"input_ids": "ab"}], {}, "`input_ids` of row 0 must be a list of token ids"),
        ([{"text": "a"}], {"formatting_fn": lambda record: ["a"]}, "must return a text, got list for row 0"),
        ([], {}, "at least one record"),
        ("a", {}, "must be a list of records, got a str"),
    ],
)
def test_bad_records_are_named(records, options, message):
    with pytest.raises(ValueError, match=message):
        DemonstrationSet(records, row_format(**options), seed=0)


def test_bad_formats_are_refused():
    with pytest.raises(ValueError, match="a `formatting_fn` makes one text"):
        row_format(formatting_fn=str, completion_only_loss=True)
    with pytest.raises(ValueError, match="`max_length` must be at least 2"):
        row_format(max_length=1)
    with pytest.raises(ValueError, match="must have an EOS token"):
        row_format(chat_tokenizer(eos_token=None))


def test_a_streams_errors_name_the_row():
    with pytest.raises(ValueError, match="row 7"):
        row_format(chat_tokenizer(None)).encode(DIALOGUE, 7)
