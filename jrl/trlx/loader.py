# SPDX-License-Identifier: Apache-2.0
"""Rows of a pipeline or a store made into arrays, and microbatches of batches."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jrl.data.batching import pad_left, pad_right
from jrl.data.tokenizer import load_tokenizer
from jrl.interop import in_kind_of


class MiniBatchIterator:
    """Lists of microbatches, one list a batch, cut in order.

    Args:
      data_loader: Yields batches: data classes, or mappings such as tokenizers return.
      mb_size: Rows of a microbatch; the last one of a short batch may have fewer, which is warned of.
      num_mb: Most microbatches of a batch; a short batch has fewer, which is warned of.
    """

    def __init__(self, data_loader: Iterable[Any], mb_size: int, num_mb: int) -> None:
        self.data_loader, self.mb_size, self.num_mb = data_loader, mb_size, num_mb
        self.data_loader_iter = iter(data_loader)

    def __iter__(self) -> MiniBatchIterator:
        return self

    def __next__(self) -> list[Any]:
        batch = next(self.data_loader_iter)
        given = vars(batch) if dataclasses.is_dataclass(batch) else dict(batch)
        columns = {name: column for name, column in given.items() if column is not None}
        rows = min(len(column) for column in columns.values())
        starts = [start for start in range(0, self.num_mb * self.mb_size, self.mb_size) if start < rows]
        if not starts:
            raise StopIteration
        if starts[-1] + self.mb_size > rows or len(starts) < self.num_mb:
            warnings.warn(
                f"A batch of {rows} rows is cut into {len(starts)} microbatches, the last of "
                f"{min(self.mb_size, rows - starts[-1])}; {self.num_mb} of {self.mb_size} were asked for. Is it the "
                "last batch of a pass?",
                stacklevel=2,
            )
        return [rebuilt(batch, columns, slice(start, start + self.mb_size)) for start in starts]


def rebuilt(batch: Any, columns: Mapping[str, Any], rows: slice) -> Any:
    """A batch of the same kind with some of the rows."""
    kind: Any = type(batch)
    cut = {name: column[rows] for name, column in columns.items()}
    return kind(**cut) if dataclasses.is_dataclass(batch) else kind(cut)


def padded(rows: Sequence[Sequence[int]], *, pad_token_id: int, padding_side: str) -> dict[str, np.ndarray]:
    """`input_ids` and `attention_mask` (1 on real tokens), int32, padded to the longest on that side."""
    pad = pad_left if padding_side == "left" else pad_right
    tokens, mask = pad(rows, pad_token_id=pad_token_id)
    return {"input_ids": tokens, "attention_mask": mask.astype(np.int32)}


def stacked(arrays: Iterable[Any], *, fill: float = 0, left: bool = False) -> Any:
    """Ragged rows as one array, filled up to the longest; of torch tensors one torch tensor.

    Args:
      arrays: One-dimensional, of one type.
      fill: Stands where a row has ended.
      left: Whether rows end together instead of beginning together.
    """
    given = list(arrays)
    rows = [np.asarray(array) for array in given]
    width = max(len(row) for row in rows)
    found = np.full((len(rows), width), fill, rows[0].dtype)
    for number, row in enumerate(rows):
        found[number, width - len(row) if left else 0 :][: len(row)] = row
    return in_kind_of(given[0], found)


def with_pad_token(tokenizer: Any) -> Any:
    """The tokenizer, or a copy that pads with EOS where it has no pad token."""
    if tokenizer.pad_token_id is not None:
        return tokenizer
    sides = {"padding_side": tokenizer.padding_side, "truncation_side": tokenizer.truncation_side}
    return load_tokenizer(tokenizer, **sides)
