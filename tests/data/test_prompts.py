# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import warnings

import numpy as np
import pytest

from jrl.data.ordering import shuffled
from jrl.data.prompts import PromptSet
from jrl.data.tokenizer import check_vocabulary, load_tokenizer
from tests.tiny import PAD_ID, tiny_tokenizer


def prompt_set(prompts, max_length=8, **settings):
    return PromptSet(prompts, tiny_tokenizer(), max_length=max_length, seed=0, **settings)


def texts(prompts):
    batch = prompts.rows(np.arange(len(prompts)), width=8)
    return [tiny_tokenizer().decode(row) for row in batch.token_lists]


@pytest.fixture
def truncate_left(monkeypatch):
    monkeypatch.setattr(tiny_tokenizer(), "truncation_side", "left")


class TestRows:
    def test_left_padded_with_metadata(self):
        prompts = prompt_set([{"prompt": "ab", "n": 1}, {"prompt": "c", "n": 2}])
        batch = prompts.rows(np.array([1, 0, 1]), width=4)
        a, b, c = (tiny_tokenizer().convert_tokens_to_ids(x) for x in "abc")
        assert batch.inputs.tokens.tolist() == [[PAD_ID] * 3 + [c], [PAD_ID] * 2 + [a, b], [PAD_ID] * 3 + [c]]
        assert batch.inputs.attention_mask.sum(axis=1).tolist() == [1, 2, 1]
        assert batch.token_lists == [[c], [a, b], [c]]
        assert batch.metadata == {"n": [2, 1, 2]}
        assert prompts.width(np.array([0, 1])) == 8

    def test_the_callers_dicts_stay_as_they_are(self):
        entry = {"prompt": "ab", "n": 1}
        for _ in range(2):
            prompt_set([entry])
        assert entry == {"prompt": "ab", "n": 1}

    @pytest.mark.parametrize(
        ("prompts", "error", "message"),
        [
            ([], ValueError, "at least one"),
            (["a", ""], ValueError, "prompt 1 must not be empty"),
            (["a", 3], TypeError, "prompt 1 must be a string"),
            ([{"text": "a"}], TypeError, "prompt 0"),
            ([{"prompt": "a", "n": 1}, {"prompt": "b"}], ValueError, "same metadata keys"),
        ],
    )
    def test_what_is_no_prompt_is_refused(self, prompts, error, message):
        with pytest.raises(error, match=message):
            prompt_set(prompts)


class TestLongPrompts:
    long = ("abc", "abcdefgh", "d")

    def test_lore_1_13_cut_on_the_right_and_counted(self):
        with pytest.warns(
            UserWarning, match="1 of 3 prompts have more than 4 tokens and were cut on the right"
        ):
            prompts = prompt_set(self.long, max_length=4)
        assert texts(prompts) == ["abc", "abcd", "d"]
        assert prompts.num_long == 1

    def test_lore_1_13_cut_on_the_left(self, truncate_left):
        with pytest.warns(UserWarning, match="cut on the left"):
            assert texts(prompt_set(self.long, max_length=4)) == ["abc", "efgh", "d"]

    def test_lore_1_13_dropped_loudly_and_the_order_of_the_rest_unchanged(self):
        with pytest.warns(UserWarning, match="1 of 3 prompts .* were dropped"):
            assert texts(prompt_set(self.long, max_length=4, long_prompts="drop")) == ["abc", "d"]

    def test_error(self):
        with pytest.raises(ValueError, match="prompt 1 must have at most 4 tokens, got 8"):
            prompt_set(self.long, max_length=4, long_prompts="error")
        with pytest.raises(ValueError, match="`long_prompts`"):
            prompt_set(self.long, long_prompts="ignore")

    def test_prompts_that_fit_cause_no_warning(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            prompt_set(self.long, max_length=8)


class TestOrder:
    def test_lore_9_1_position_i_is_the_same_prompt_however_one_gets_there(self):
        whole = shuffled(np.arange(35), size=10, seed=3)
        np.testing.assert_array_equal(shuffled(np.arange(20, 35), size=10, seed=3), whole[20:])
        np.testing.assert_array_equal(shuffled(np.arange(35)[::-1], size=10, seed=3), whole[::-1])

    def test_each_epoch_visits_everything_once_in_its_own_order(self):
        order = prompt_set(list("abcdefghij")).order(np.arange(30)).reshape(3, 10)
        assert np.sort(order, axis=1).tolist() == [list(range(10))] * 3
        assert len({tuple(epoch) for epoch in order.tolist()}) == 3

    def test_seeds_differ(self):
        first, second = (shuffled(np.arange(10), size=10, seed=seed) for seed in (0, 1))
        assert first.tolist() != second.tolist()


class TestTokenizer:
    @pytest.fixture
    def folder(self, tmp_path):
        tiny_tokenizer().save_pretrained(tmp_path)
        return tmp_path

    def test_load(self, folder):
        tokenizer = load_tokenizer(folder, padding_side="right", truncation_side="left")
        assert (tokenizer.padding_side, tokenizer.truncation_side) == ("right", "left")
        assert (tokenizer.eos_token, tokenizer.pad_token) == ("<eos>", "<pad>")

    def test_without_a_pad_token_the_eos_fills_rows(self, folder):
        with pytest.warns(UserWarning, match="has no pad token"):
            tokenizer = load_tokenizer(folder, extra={"pad_token": None})
        assert tokenizer.pad_token_id == tokenizer.eos_token_id

    def test_without_an_eos_token_it_is_refused(self, folder):
        with pytest.raises(ValueError, match="EOS"):
            load_tokenizer(folder, extra={"eos_token": None})

    def test_sides_are_checked(self):
        with pytest.raises(ValueError, match="`padding_side`"):
            load_tokenizer("nowhere", padding_side="top")

    def test_a_tokenizer_larger_than_the_model_is_refused(self):
        check_vocabulary(tiny_tokenizer(), 97)
        with pytest.raises(ValueError, match="at most the model's 96 ids, got 97"):
            check_vocabulary(tiny_tokenizer(), 96)
