# SPDX-License-Identifier: Apache-2.0
"""Rows of many lengths, as both sides of `benchmarks/long_tail.py` read them: NumPy alone."""

from __future__ import annotations

import numpy as np

PROMPT, MEDIAN, SPREAD, LONGEST = 16, 32, 1.0, 512
"""Tokens of each prompt; median and standard deviation of the logarithm of the tokens behind it; most of them."""


def rows_of(count: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts (R, PROMPT) and lengths (R,): log-normal, rounded, cut at `LONGEST`; the same in every call.

    Args:
      count: R.
      vocab_size: Ids of prompts lie in [2, V).
    """
    chance = np.random.default_rng(0)
    lengths = np.rint(chance.lognormal(np.log(MEDIAN), SPREAD, count)).clip(1, LONGEST).astype(np.int32)
    return chance.integers(2, vocab_size, (count, PROMPT), dtype=np.int32), lengths
