# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from jrl.data.batching import bucket_length, pad_left, pad_right


class TestBucketLength:
    def test_golden(self):
        lengths = [0, 1, 8, 9, 63, 64, 65, 96, 97, 128, 129, 192, 193, 1024, 1025]
        widths = [8, 8, 8, 16, 64, 64, 96, 96, 128, 128, 192, 192, 256, 1024, 1536]
        assert [bucket_length(n) for n in lengths] == widths

    def test_holds_every_length_in_few_widths(self):
        assert all(n <= bucket_length(n) <= max(n + 7, 1.5 * n) for n in range(1, 4097))
        assert len({bucket_length(n) for n in range(1, 4097)}) == 8 + 2 * 6


class TestPad:
    def test_left(self):
        tokens, mask = pad_left([[5], [6, 7, 8]], pad_token_id=9)
        assert tokens.tolist() == [[9, 9, 5], [6, 7, 8]]
        assert mask.tolist() == [[False, False, True], [True, True, True]]
        assert tokens.dtype == np.int32 and mask.dtype == bool

    def test_right_to_a_width(self):
        tokens, mask = pad_right([[5], [6, 7], []], pad_token_id=9, width=4)
        assert tokens.tolist() == [[5, 9, 9, 9], [6, 7, 9, 9], [9, 9, 9, 9]]
        assert mask.sum(axis=1).tolist() == [1, 2, 0]

    @pytest.mark.parametrize("pad", [pad_left, pad_right])
    def test_lore_1_3_the_mask_comes_from_lengths_and_not_from_the_pad_id(self, pad):
        _, mask = pad([[5, 1], [1, 5, 1]], pad_token_id=1, width=3)
        assert mask.sum(axis=1).tolist() == [2, 3]

    def test_no_rows(self):
        assert pad_left([], pad_token_id=0, width=8)[0].shape == (0, 8)

    def test_too_narrow_names_the_row(self):
        with pytest.raises(ValueError, match="row 1 has 3 tokens, got 2"):
            pad_right([[1], [1, 2, 3]], pad_token_id=0, width=2)
