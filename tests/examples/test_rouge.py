# SPDX-License-Identifier: Apache-2.0
"""ROUGE by hand, and what it must not depend on."""

import pytest

from examples.summaries.rouge import rouge, rouge_l, rouge_n

TEXT, REFERENCE = "The police killed the gunman.", "the gunman killed police"


def test_unigrams():
    # 5 words and 4; shared: the (once, as the reference has it once), police, killed, gunman: 2·4/(5 + 4)
    assert rouge_n(TEXT, REFERENCE, n=1) == pytest.approx(8 / 9)


def test_bigrams():
    # {the police, police killed, killed the, the gunman} and {the gunman, gunman killed, killed police}: 2·1/(4 + 3)
    assert rouge_n(TEXT, REFERENCE, n=2) == pytest.approx(2 / 7)


def test_longest_common_subsequence():
    # "the killed", "the gunman" or "the police": 2 words: 2·2/(5 + 4)
    assert rouge_l(TEXT, REFERENCE) == pytest.approx(4 / 9)


def test_equal_texts_score_one_and_strangers_nothing():
    for score in rouge([REFERENCE, "a b c"], [REFERENCE, "d e f"]).values():
        assert score == [1.0, 0.0]


@pytest.mark.parametrize("text", ["", "!?", "one"])
def test_texts_too_short_for_a_bigram_score_nothing(text):
    assert rouge_n(text, "one two", n=2) == 0.0
    assert rouge_l("", "one two") == 0.0


def test_case_and_punctuation_do_not_count_and_sides_are_equal():
    assert rouge_l("A storm, at last!", "a storm at last") == 1.0
    assert rouge_n(TEXT, REFERENCE, n=2) == rouge_n(REFERENCE, TEXT, n=2)
    assert rouge_l(TEXT, REFERENCE) == rouge_l(REFERENCE, TEXT)


def test_the_mean_is_that_of_the_three():
    found = rouge([TEXT], [REFERENCE])
    assert found["rouge_mean"] == [pytest.approx((8 / 9 + 2 / 7 + 4 / 9) / 3)]
