# SPDX-License-Identifier: Apache-2.0
import copy
import warnings

import numpy as np
import pytest

from jrl.data.prompts import PromptSet
from jrl.data.tokenizer import load_tokenizer
from tests.tiny import EOS_ID, PAD_ID, tiny_t5_tokenizer, tiny_tokenizer

TEXTS = ["abc", "abcdefghij", "xy", "klmnopqrs"]


def prompt_set(prompts=TEXTS, *, tokenizer=None, max_length=16, seed=0, long_prompts="truncate"):
    return PromptSet(
        prompts, tokenizer or tiny_tokenizer(), max_length=max_length, seed=seed, long_prompts=long_prompts
    )


def texts(found):
    batch = found.rows(np.arange(len(found)), width=16)
    return [tiny_tokenizer().decode(row) for row in batch.token_lists]


class TestRows:
    def test_left_padded_with_their_ids(self):
        batch = prompt_set().rows(np.array([2, 0]), width=4)
        x, y, a, b, c = (tiny_tokenizer().convert_tokens_to_ids(letter) for letter in "xyabc")
        assert batch.inputs.tokens.tolist() == [[PAD_ID, PAD_ID, x, y], [PAD_ID, a, b, c]]
        assert batch.inputs.attention_mask.astype(int).tolist() == [[0, 0, 1, 1], [0, 1, 1, 1]]
        assert batch.token_lists == [[x, y], [a, b, c]] and batch.metadata == {}
        assert batch.inputs.tokens.dtype == np.int32 and batch.inputs.attention_mask.dtype == bool

    def test_width_is_a_bucket_of_the_longest_within_the_limit(self):
        assert prompt_set().width(np.array([0, 2])) == 8
        assert prompt_set().width(np.arange(4)) == 16
        assert prompt_set(max_length=10).width(np.arange(4)) == 10

    def test_special_token_text_is_its_id(self):
        assert prompt_set(["<eos>"]).rows(np.array([0]), width=8).token_lists == [[EOS_ID]]

    def test_lore_1_3_pad_may_be_eos(self):
        tokenizer = copy.deepcopy(tiny_tokenizer())
        tokenizer.pad_token = tokenizer.eos_token
        batch = prompt_set(["<eos>ab<eos>", "abcdef"], tokenizer=tokenizer).rows(np.array([0, 1]), width=8)
        assert batch.inputs.attention_mask.sum(axis=1).tolist() == [4, 6]


class TestMetadata:
    PROMPTS = ({"prompt": "ab", "topic": "x", "answer": 1}, {"prompt": "cd", "answer": 2, "topic": "y"})

    def test_travels_with_its_prompt(self):
        batch = prompt_set(self.PROMPTS).rows(np.array([1, 0, 1]), width=8)
        assert batch.metadata == {"topic": ["y", "x", "y"], "answer": [2, 1, 2]}

    def test_the_callers_dicts_stay_as_they_are(self):
        before = copy.deepcopy(self.PROMPTS)
        for _ in range(2):
            prompt_set(self.PROMPTS)
        assert before == self.PROMPTS

    def test_dropped_prompts_take_theirs_along(self):
        prompts = [{"prompt": text, "number": number} for number, text in enumerate(TEXTS)]
        with pytest.warns(UserWarning, match="dropped"):
            found = prompt_set(prompts, max_length=9, long_prompts="drop")
        assert found.metadata(np.arange(3)) == {"number": [0, 2, 3]}

    @pytest.mark.parametrize(
        ("prompts", "message"),
        [
            ([{"prompt": "a"}, {"text": "b"}], 'prompt 1 has no key "prompt"'),
            (
                [{"prompt": "a", "x": 1}, {"prompt": "b"}],
                r"prompt 1 has the metadata \[\], prompt 0 has \['x'\]",
            ),
            (["a", {"prompt": "b", "x": 1}], r"prompt 1 has the metadata \['x'\]"),
            (["a", 3], "prompt 1 must be a text or a list of messages with `role` and `content`, got int"),
            (["a", ""], r"prompt 1 .* has no tokens"),
            ([], "at least one prompt"),
            ("abc", "list of texts"),
        ],
    )
    def test_bad_prompts_are_named(self, prompts, message):
        with pytest.raises(ValueError, match=message):
            prompt_set(prompts)


class TestMessages:
    TEMPLATE = (
        "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    CHAT = ({"role": "user", "content": "hi"},)

    def chat_tokenizer(self):
        tokenizer = load_tokenizer(tiny_tokenizer())
        tokenizer.chat_template = self.TEMPLATE
        return tokenizer

    def test_they_are_rendered_up_to_the_assistants_turn(self):
        tokenizer = self.chat_tokenizer()
        prompts = [{"prompt": list(self.CHAT), "topic": "x"}, {"prompt": "user:hi;assistant:", "topic": "y"}]
        found = PromptSet(prompts, tokenizer, max_length=32, seed=0, long_prompts="error")
        rendered, plain = found.rows(np.arange(2), width=32).token_lists
        assert rendered == plain
        assert found.metadata(np.arange(2)) == {"topic": ["x", "y"]}

    def test_without_a_template_they_are_refused(self):
        with pytest.raises(ValueError, match="need a chat template, and the tokenizer has none"):
            prompt_set([list(self.CHAT)])

    def test_an_answer_at_the_end_is_refused(self):
        chat = [*self.CHAT, {"role": "assistant", "content": "yo"}]
        with pytest.raises(ValueError, match="must not end with an assistant's message"):
            PromptSet([chat], self.chat_tokenizer(), max_length=32, seed=0, long_prompts="error")


class TestLongPrompts:
    @pytest.mark.parametrize(("side", "kept"), [("right", "abcdefghi"), ("left", "bcdefghij")])
    def test_lore_1_13_cut_on_the_side_that_is_meant_and_counted(self, side, kept):
        tokenizer = load_tokenizer(tiny_tokenizer(), truncation_side=side)
        with pytest.warns(
            UserWarning, match=f"1 of 4 prompts .* 9 tokens and were cut on the {side}"
        ) as seen:
            found = prompt_set(tokenizer=tokenizer, max_length=9)
        assert len(seen) == 1
        assert texts(found) == ["abc", kept, "xy", "klmnopqrs"]
        assert (found.num_truncated, found.num_dropped) == (1, 0)

    def test_lore_1_13_dropped_loudly_and_the_order_of_the_others_stays(self):
        with pytest.warns(UserWarning, match=r"1 of 4 prompts .* were dropped; 3 are left") as seen:
            found = prompt_set(max_length=9, long_prompts="drop")
        assert len(seen) == 1
        assert texts(found) == ["abc", "xy", "klmnopqrs"]
        assert (len(found), found.num_truncated, found.num_dropped) == (3, 0, 1)

    def test_refused(self):
        with pytest.raises(ValueError, match="prompt 1 has 10 tokens, and there is room for 9"):
            prompt_set(max_length=9, long_prompts="error")

    def test_none_left(self):
        with pytest.raises(ValueError, match="none is left"):
            prompt_set(max_length=1, long_prompts="drop")

    def test_unknown_way(self):
        with pytest.raises(ValueError, match="`long_prompts` must be one of"):
            prompt_set(long_prompts="cut")

    @pytest.mark.parametrize("way", ["truncate", "drop", "error"])
    def test_prompts_that_fit_cause_no_warning(self, way):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            prompt_set(max_length=10, long_prompts=way)


class TestOrder:
    def test_lore_9_1_a_resumed_run_sees_what_it_would_have_seen(self):
        whole = prompt_set(seed=5).order(np.arange(24))
        np.testing.assert_array_equal(prompt_set(seed=5).order(np.arange(16, 24)), whole[16:])
        epochs = whole.reshape(6, 4).tolist()
        assert [sorted(one) for one in epochs] == [[0, 1, 2, 3]] * 6
        assert len({tuple(one) for one in epochs}) > 1

    def test_seeds_differ(self):
        places = np.arange(24)
        assert (prompt_set(seed=0).order(places) != prompt_set(seed=1).order(places)).any()


class TestForAnEncoder:
    START = 7

    def prompts(self, texts, *, max_length=16, side="right", tokenizer=None):
        tokenizer = load_tokenizer(tokenizer or tiny_t5_tokenizer(), truncation_side=side)
        return PromptSet(
            texts,
            tokenizer,
            max_length=max_length,
            seed=0,
            long_prompts="truncate",
            decoder_start_token_id=self.START,
        )

    def test_the_encoder_reads_prompts_with_their_end_and_the_decoder_starts(self):
        batch = self.prompts(["ab", "c"]).rows(np.arange(2), width=4)
        a, b, c = (tiny_tokenizer().convert_tokens_to_ids(letter) for letter in "abc")
        assert batch.inputs.tokens.tolist() == [[self.START]] * 2 and batch.inputs.attention_mask.all()
        assert batch.inputs.context_tokens.tolist() == [[PAD_ID, a, b, EOS_ID], [PAD_ID, PAD_ID, c, EOS_ID]]
        assert batch.inputs.context_mask.astype(int).tolist() == [[0, 1, 1, 1], [0, 0, 1, 1]]
        assert batch.token_lists == [[a, b, EOS_ID], [c, EOS_ID]]
        assert batch.inputs.tokens.dtype == np.int32

    @pytest.mark.parametrize(("side", "kept"), [("right", "abc"), ("left", "cde")])
    def test_a_cut_prompt_keeps_its_end(self, side, kept):
        with pytest.warns(UserWarning, match="1 of 1 prompts have more than 3 tokens"):
            found = self.prompts(["abcde"], max_length=4, side=side)
        ids = [tiny_tokenizer().convert_tokens_to_ids(letter) for letter in kept]
        assert found.rows(np.array([0]), width=4).token_lists == [[*ids, EOS_ID]]

    def test_an_empty_prompt_is_its_end(self):
        assert self.prompts([""]).rows(np.array([0]), width=8).token_lists == [[EOS_ID]]

    def test_without_room_beside_the_special_tokens(self):
        with pytest.raises(ValueError, match="`max_length` must leave room beside the 1 special tokens"):
            self.prompts(["a"], max_length=1)

    def test_samples_have_a_separator(self):
        tokenizer = copy.deepcopy(tiny_t5_tokenizer())
        tokenizer.sep_token = "|"
        assert self.prompts(["a"]).separator == "<sep>"
        assert self.prompts(["a"], tokenizer=tokenizer).separator == "|"
        assert prompt_set().separator is None


class TestFromTokens:
    """Prompts that somebody else has tokenised."""

    def made(self, rows, **others):
        options = dict(max_length=3, seed=0) | others
        return PromptSet.from_tokens(rows, {"n": list(range(len(rows)))}, tiny_tokenizer(), **options)

    def test_rows_and_metadata_stay_as_they_are(self):
        found = self.made([[5, 6], [7]])
        batch = found.rows(np.arange(2), width=3)
        assert batch.token_lists == [[5, 6], [7]] and batch.metadata == {"n": [0, 1]}
        assert found.separator is None and found.num_truncated == found.num_dropped == 0

    def test_long_rows_are_cut_and_told(self):
        with pytest.warns(
            UserWarning, match="1 of 2 prompts have more than 3 tokens and were cut on the right"
        ):
            found = self.made([[5, 6, 7, 8], [7]])
        assert found.rows(np.arange(1), width=3).token_lists == [[5, 6, 7]] and found.num_truncated == 1

    def test_an_encoder_reads_them(self):
        found = self.made([[5, 6]], decoder_start_token_id=0)
        inputs = found.rows(np.arange(1), width=3).inputs
        assert inputs.tokens.tolist() == [[0]] and inputs.context_tokens.tolist() == [[0, 5, 6]]
        assert found.separator == "<sep>"

    def test_empty_ones_are_errors(self):
        with pytest.raises(ValueError, match="at least one prompt, got none"):
            self.made([])
        with pytest.raises(ValueError, match="prompt 1 has no tokens"):
            self.made([[5], []])
