# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from jrl.data.batching import bucket_length, pad_left, pad_right

ROWS = [[5, 6, 7], [0], [8, 9]]


class TestPad:
    def test_left(self):
        tokens, mask = pad_left(ROWS, pad_token_id=0, width=4)
        assert tokens.tolist() == [[0, 5, 6, 7], [0, 0, 0, 0], [0, 0, 8, 9]]
        assert mask.astype(int).tolist() == [[0, 1, 1, 1], [0, 0, 0, 1], [0, 0, 1, 1]]

    def test_right(self):
        tokens, mask = pad_right(ROWS, pad_token_id=1)
        assert tokens.tolist() == [[5, 6, 7], [0, 1, 1], [8, 9, 1]]
        assert mask.astype(int).tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]

    def test_lore_1_3_the_mask_comes_from_lengths_and_not_from_the_pad_id(self):
        assert pad_left(ROWS, pad_token_id=0)[1].sum() == pad_right(ROWS, pad_token_id=0)[1].sum() == 6

    def test_a_row_that_does_not_fit_is_refused(self):
        with pytest.raises(ValueError, match=r"longest row, 3 tokens, got 2"):
            pad_left(ROWS, pad_token_id=0, width=2)


class TestBuckets:
    def test_every_length_fits_with_little_waste_into_few_buckets(self):
        buckets = [bucket_length(length, max_length=1000) for length in range(1, 1001)]
        assert all(bucket >= length for length, bucket in enumerate(buckets, start=1))
        assert all(bucket <= 1.5 * length for length, bucket in enumerate(buckets, start=1) if length > 8)
        assert len(set(buckets)) == 15

    def test_golden(self):
        assert [bucket_length(n, max_length=100) for n in (8, 9, 17, 30, 40, 97)] == [8, 12, 24, 32, 48, 100]

    def test_beyond_the_maximum_is_refused(self):
        with pytest.raises(ValueError, match="`length`"):
            bucket_length(9, max_length=8)
