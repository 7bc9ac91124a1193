# SPDX-License-Identifier: Apache-2.0
"""Ragged rows as rectangular arrays of a few widths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int


def bucket_length(length: int) -> int:
    """The smallest allowed width that holds `length` tokens: every width is a program to compile, so there are few.

    Multiples of 8 up to 64, then powers of two and the halves between them (96, 128, 192, 256, ...): at most a third
    of a row is padding above 64.

    Args:
      length: Tokens of the longest row, at least 0; 0 takes the smallest bucket.
    Example:
      >>> [bucket_length(n) for n in (1, 8, 9, 65, 100, 129, 300)]
      [8, 8, 16, 96, 128, 192, 384]
    """
    if length <= 64:
        return max(8, -(-length // 8) * 8)
    power = 1 << (length - 1).bit_length()
    return power * 3 // 4 if length <= power * 3 // 4 else power


def pad_left(
    rows: Sequence[Sequence[int]], *, pad_token_id: int, width: int | None = None
) -> tuple[Int[np.ndarray, "B L"], Bool[np.ndarray, "B L"]]:
    """Rows that end together, as the sampler reads them.

    Args:
      rows: Ids of each row.
      pad_token_id: Fills the columns before each row; it may be a real token too, since the mask comes from lengths.
      width: Number of columns; None takes the longest row.
    Returns:
      int32 ids and the mask that is True on real tokens.
    Raises:
      ValueError: If a row is longer than `width`.
    """
    return _pad(rows, pad_token_id, width, left=True)


def pad_right(
    rows: Sequence[Sequence[int]], *, pad_token_id: int, width: int | None = None
) -> tuple[Int[np.ndarray, "B L"], Bool[np.ndarray, "B L"]]:
    """Rows that start together, as everything is stored; arguments and result as in `pad_left`."""
    return _pad(rows, pad_token_id, width, left=False)


def _pad(
    rows: Sequence[Sequence[int]], pad_token_id: int, width: int | None, *, left: bool
) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.asarray([len(row) for row in rows], np.int32)
    longest = int(lengths.max(initial=0))
    width = longest if width is None else width
    if longest > width:
        raise ValueError(
            f"`width` must hold the longest row: row {int(lengths.argmax())} has {longest} tokens, got {width}."
        )
    columns = np.arange(width, dtype=np.int32)[None, :]
    mask = columns >= width - lengths[:, None] if left else columns < lengths[:, None]
    tokens = np.full((len(rows), width), pad_token_id, np.int32)
    # A boolean index walks row by row, in the order in which the ids are laid end to end here.
    tokens[mask] = np.concatenate([np.zeros(0, np.int32), *(np.asarray(row, np.int32) for row in rows)])
    return tokens, mask
