# SPDX-License-Identifier: Apache-2.0
"""Passes over a data set in the shape of torch's loaders, in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

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
