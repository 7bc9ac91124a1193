# SPDX-License-Identifier: Apache-2.0
"""Base of trlX's trainers that learn from samples: their store shows the samples, or is itself learned from."""

from __future__ import annotations

import abc
from typing import Any, cast

from jrl.trainers.offline import OfflineTrainer
from jrl.trlx.store_rows import fingerprint_of, refuse_own_loader
from jrl.trlx.stores import BaseRolloutStore
from jrl.trlx.trainer.accelerate_base_trainer import AccelerateRLTrainer


class OfflineRLTrainer(AccelerateRLTrainer):
    """A trainer whose `store` is made of the samples when it is read. One that a script sets or adds to is learned."""

    _fingerprint: str | None = None
    """Of the store whose elements jrl's own trainer has."""

    @property
    def native_offline(self) -> OfflineTrainer:
        """jrl's own trainer."""
        return cast(OfflineTrainer, self.native)

    @abc.abstractmethod
    def _store_of(self, samples: Any) -> BaseRolloutStore:
        """Samples as a store."""

    @abc.abstractmethod
    def _samples_of(self, store: BaseRolloutStore) -> Any:
        """A store as samples."""

    def _fill_store(self) -> None:
        if self._store is None and "samples" in vars(self.native):
            self._store = self._store_of(self.native_offline.samples)
            self._fingerprint = fingerprint_of(self._store)

    def _require_data(self) -> None:
        if self._store is not None and self._fingerprint != (found := fingerprint_of(self._store)):
            if not self._learns_here():
                refuse_own_loader(self._store)
            self.native_offline.samples, self._fingerprint = self._samples_of(self._store), found
        if "samples" not in vars(self.native):
            raise ValueError(
                f"{type(self).__name__} has no samples yet: `make_experience` sets them, or set `store`."
            )

    def _total_steps(self) -> int:
        return self.native_offline.num_steps
