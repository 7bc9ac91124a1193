# SPDX-License-Identifier: Apache-2.0
"""Batches of a pipeline or a store, and microbatches of those batches."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jrl.data.batching import pad_left, pad_right
from jrl.data.ordering import epoch_order


class DataLoader:
    """Passes over a data set. Every `iter` is a new pass; the order of each is a function of (seed, pass).

    Args:
      dataset: With a length, and elements by index.
      batch_size: Elements of a batch; the last one of a pass may have fewer.
      collate_fn: Makes a batch of a list of elements.
      shuffle: Whether every pass has an order of its own; otherwise it is that of the data set.
      sampler: Yields indices instead of either; it fixes the length where it has one.
      drop_last: Whether a last batch that is short is left out.
      seed: Of the orders.
    Raises:
      ValueError: If the batch size is below 1, or both `shuffle` and `sampler` are given.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        collate_fn: Callable[[list[Any]], Any],
        shuffle: bool = False,
        sampler: Iterable[int] | None = None,
        drop_last: bool = False,
        seed: int = 0,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"`batch_size` must be at least 1, got {batch_size}.")
        if shuffle and sampler is not None:
            raise ValueError("`shuffle` must be False beside a `sampler`, which decides the order by itself.")
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self._collate, self._shuffle, self._sampler, self._seed = collate_fn, shuffle, sampler, seed
        self._passes = 0

    def __len__(self) -> int:
        elements = len(self._sampler) if isinstance(self._sampler, Sequence) else len(self.dataset)
        return elements // self.batch_size if self.drop_last else -(-elements // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        order = self._order()
        self._passes += 1
        for start in range(0, len(order), self.batch_size):
            indices = order[start : start + self.batch_size]
            if len(indices) == self.batch_size or not self.drop_last:
                yield self._collate([self.dataset[int(index)] for index in indices])

    def _order(self) -> Sequence[int]:
        if self._sampler is not None:
            return list(self._sampler)
        if self._shuffle:
            return list(epoch_order(len(self.dataset), seed=self._seed, epoch=self._passes))
        return range(len(self.dataset))


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
