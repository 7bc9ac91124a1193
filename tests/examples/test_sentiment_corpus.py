# SPDX-License-Identifier: Apache-2.0
"""The corpus: distinct, balanced, readable, and silent about its verdict in the prompt."""

import re

import numpy as np
import pytest

from examples.sentiment.corpus import (
    MAX_WORDS,
    MIN_WORDS,
    load_corpus,
    make_corpus,
    make_prompts,
    make_reviews,
    review_grammar,
    split_corpus,
)
from examples.sentiment.rewards import vader


@pytest.fixture(scope="module")
def corpus():
    return make_corpus(2000, num_eval_prompts=64, seed=0)


@pytest.fixture(scope="module")
def scores(corpus):
    return np.array(vader(corpus.train_reviews))


def test_reviews_are_distinct_and_many(corpus):
    assert len(corpus.train_reviews) == 2000
    assert len(set(corpus.train_reviews) | set(corpus.heldout_reviews)) == 2000 + len(corpus.heldout_reviews)
    # The part after the opening differs too: not one text under many titles.
    assert len({review.split(". ", 1)[-1] for review in corpus.train_reviews}) > 1900


def test_sentiment_is_balanced_and_wide(scores):
    assert abs(scores.mean()) < 0.08
    assert scores.std() > 0.6
    assert 0.4 < (scores > 0).mean() < 0.6
    assert (np.abs(scores) < 0.6).mean() > 0.1  # mixed reviews exist


def test_prompts_are_neutral_and_do_not_tell_the_verdict(corpus):
    assert set(vader(corpus.train_prompts + corpus.eval_prompts)) == {0.0}
    # The same first two words begin favorable and critical reviews alike.
    by_opening = {}
    for review in corpus.train_reviews:
        by_opening.setdefault(tuple(review.split()[:2]), []).append(vader([review])[0])
    frequent = [np.array(group) for group in by_opening.values() if len(group) >= 20]
    assert len(frequent) > 15
    assert all(0.15 < (group > 0).mean() < 0.85 for group in frequent)


def test_prompts_have_the_promised_length(corpus):
    lengths = {len(prompt.split()) for prompt in corpus.train_prompts}
    assert lengths == set(range(MIN_WORDS, MAX_WORDS + 1))
    assert len(set(corpus.train_prompts)) == len(corpus.train_prompts) > 1000


def test_eval_prompts_are_held_out(corpus):
    assert len(corpus.eval_prompts) == len(set(corpus.eval_prompts)) == 64
    assert not set(corpus.eval_prompts) & set(corpus.train_prompts)
    openings = tuple(corpus.train_reviews)
    assert not any(review.startswith(prompt + " ") for prompt in corpus.eval_prompts for review in openings)


def test_reviews_are_deterministic_in_the_seed():
    assert make_reviews(50, seed=3) == make_reviews(60, seed=3)[:50]
    assert set(make_reviews(50, seed=3)).isdisjoint(make_reviews(50, seed=4))


def test_reviews_are_tidy(corpus):
    for review in corpus.train_reviews:
        assert not re.search(r"[{}<>|\[\]]|  | [,.;]|\b[Aa] [aeiou]|[.?!]{2}", review), review
        assert review[0].isupper() and review[-1] in ".?"
        assert all(sentence[0].isupper() for sentence in re.split(r"(?<=[.?!]) ", review)), review


def test_every_rule_is_used():
    grammar = review_grammar()
    text = " ".join(make_reviews(3000, seed=1))
    plain = [line for lines in grammar.rules.values() for line in lines if not re.search(r"[{}<(|]", line)]
    unseen = [line for line in plain if line.lower() not in text.lower()]
    assert not [
        line for line in unseen if not line.endswith("y")
    ]  # plurals such as `mysteries` hide their singular


def test_praise_and_scorn_mirror_each_other():
    rules = review_grammar().rules
    praise = {name[:-1]: len(lines) for name, lines in rules.items() if name.endswith("+")}
    scorn = {name[:-1]: len(lines) for name, lines in rules.items() if name.endswith("-")}
    aspects = {
        "verdict",
        "story",
        "acting",
        "music",
        "pace",
        "direction",
        "look",
        "dialogue",
        "people",
        "ending",
    }
    assert aspects | {"comparison", "closing"} <= praise.keys() & scorn.keys()
    assert all(praise[name] == scorn[name] for name in aspects)


def test_a_file_of_reviews_is_split(tmp_path):
    path = tmp_path / "reviews.txt"
    reviews = make_reviews(100, seed=0)
    path.write_text("\n".join(reviews) + "\n", encoding="utf-8")
    corpus = load_corpus(str(path), num_eval_prompts=5, seed=0)
    assert len(corpus.train_reviews) == 90 and len(corpus.heldout_reviews) == 10
    assert sorted(corpus.train_reviews + corpus.heldout_reviews) == sorted(reviews)
    assert 1 <= len(corpus.eval_prompts) <= 5


def test_too_few_reviews_to_hold_out_a_prompt():
    with pytest.raises(ValueError, match="no prompt can be held out of 1 reviews"):
        split_corpus(["One review only."], num_train=1, num_eval_prompts=4, seed=0)


def test_a_short_review_is_its_own_prompt():
    assert make_prompts(["Short.", "Short."], seed=0) == ["Short."]
