# SPDX-License-Identifier: Apache-2.0
"""Variety and fluency of completions, by hand and on a model whose distribution is known."""

import pytest

from examples.sentiment.judge import distinct_2


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([], 0.0),
        (["one"], 0.0),
        (["a b c"], 1.0),
        (["a b a b", "a b"], 0.5),  # (a b) (b a) (a b) | (a b): 2 distinct of 4; no bigram spans two texts
        (["a b", "a b", "a b", "c d"], 0.5),
    ],
)
def test_distinct_2(texts, expected):
    assert distinct_2(texts) == expected
