# SPDX-License-Identifier: Apache-2.0
"""Small rows, plain and packed."""

from __future__ import annotations

import numpy as np

from jrl.data.demonstrations.packing import PackedSet
from jrl.data.demonstrations.rows import DialogueRow, RowSet
from tests.tiny import EOS_ID, PAD_ID, VOCAB_SIZE


def rows_of(*lengths, seed=0):
    """Rows of random ids, of which the first third is a prompt."""
    rng = np.random.default_rng(seed)
    return [
        DialogueRow(
            [*rng.integers(2, VOCAB_SIZE, n - 1).tolist(), EOS_ID], [i >= max(n // 3, 1) for i in range(n)]
        )
        for n in lengths
    ]


def plain_set(rows):
    """Each row by itself."""
    return RowSet(rows, pad_token_id=PAD_ID, max_length=64, seed=1)


def packed_set(rows, capacity=16, strategy="bfd", seed=1):
    """Several in a row."""
    return PackedSet(plain_set(rows), capacity=capacity, strategy=strategy, pad_token_id=PAD_ID, seed=seed)
