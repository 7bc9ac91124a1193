# SPDX-License-Identifier: Apache-2.0
"""trlX's pipelines: data sets on the host that make their own batches."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any

from jrl.interop import DataLoader
from jrl.trlx.data import GeneralElement
from jrl.trlx.loader import MiniBatchIterator
from jrl.trlx.registry import register_datapipeline
from jrl.trlx.stores import BaseRolloutStore

__all__ = ["BasePipeline", "BaseRolloutStore", "MiniBatchIterator", "register_datapipeline"]


@register_datapipeline
class BasePipeline(abc.ABC):
    """A data set that makes its own batches.

    Args:
      path: Where the data are, for those who read from a disk.
    """

    def __init__(self, path: str = "dataset") -> None:
        self.path = path

    @abc.abstractmethod
    def __getitem__(self, index: int) -> GeneralElement | Mapping[str, Any]:
        """Returns an element."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of elements."""

    @abc.abstractmethod
    def create_loader(
        self, batch_size: int, shuffle: bool, prep_fn: Callable[..., Any] | None = None, num_workers: int = 0
    ) -> DataLoader:
        """Batches of the data set.

        Args:
          batch_size: Elements of a batch.
          shuffle: Whether every pass has an order of its own.
          prep_fn: Applied to a batch after it was made.
          num_workers: Processes that prepare batches; 0 is this one.
        """
