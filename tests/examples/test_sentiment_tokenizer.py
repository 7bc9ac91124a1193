# SPDX-License-Identifier: Apache-2.0
"""The tokenizer the example trains is a real one: saved, loaded by transformers, and without loss."""

import pytest
from transformers import AutoTokenizer

from examples.sentiment.corpus import make_reviews
from examples.sentiment.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def reviews():
    return make_reviews(400, seed=0)


@pytest.fixture(scope="module")
def tokenizer(reviews):
    return train_tokenizer(reviews, vocab_size=600, max_length=128)


def test_size_and_special_tokens(tokenizer):
    assert len(tokenizer) == 600
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    assert tokenizer.model_max_length == 128


def test_text_round_trips(tokenizer, reviews):
    for text in [*reviews[:50], "Zoë 🙂 — unseen\tletters\n"]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text


def test_prompt_and_completion_tokenize_apart(tokenizer, reviews):
    for review in reviews[:20]:
        head, tail = " ".join(review.split()[:5]), " " + " ".join(review.split()[5:])
        encode = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (head, tail, review)]
        assert encode[0] + encode[1] == encode[2]


def test_transformers_loads_what_was_saved(tokenizer, reviews, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded(reviews[0])["input_ids"] == tokenizer(reviews[0])["input_ids"]
    assert (loaded.eos_token_id, loaded.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
