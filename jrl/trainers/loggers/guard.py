# SPDX-License-Identifier: Apache-2.0
"""Keeps a tracker's troubles away from the run: it may fail, stall, or never answer, and training goes on."""

from __future__ import annotations

import queue
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from jrl.trainers.loggers.loggers import ImageLogger, Logger

    class Tracker(Logger, ImageLogger, Protocol):
        """A tracker to guard."""


WAITING = 10_000
"""Calls that may wait for a slow tracker; what comes beyond them is left out."""
PATIENCE = 60.0
"""Seconds that the end of a run waits for its tracker."""


class GuardedTracker:
    """Calls a tracker in a background thread, in order; records that it fails to take are left out.

    The run is warned of the first failure and, at its end, of how much is missing: `metrics.jsonl` has it all.

    Args:
      tracker: Not used by anyone else.
      name: What `train.tracker` calls it.
      patience: Seconds that `close` waits for what is still to be told.
    """

    def __init__(self, tracker: Tracker, name: str, *, patience: float = PATIENCE) -> None:
        self._tracker, self._name, self._patience = tracker, name, patience
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(WAITING)
        # A daemon: a tracker that never returns must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._started = False
        self._missed, self._told = 0, False
        self._error: Exception | None = None

    def start(self, description: Mapping[str, Any], *, total_steps: int, step: int) -> None:
        """Begins the tracker's run, on this thread: it may ask the user something. Where that fails, that is all."""
        try:
            self._tracker.start(description, total_steps=total_steps, step=step)
        except Exception as error:  # of somebody else's package: anything may come
            self._error = error
        else:
            self._started = True
            self._thread.start()
        self._tell()

    def log(self, record: Mapping[str, Any], step: int) -> None:
        """Queues a record."""
        self._put(lambda: self._tracker.log(record, step))

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Queues a table of samples."""
        self._put(lambda: self._tracker.log_table(name, columns, rows, step))

    def log_images(self, images: Mapping[str, np.ndarray], step: int) -> None:
        """Queues images."""
        self._put(lambda: self._tracker.log_images(images, step))

    def flush(self) -> None:
        """Asks for it, and does not wait."""
        self._put(self._tracker.flush)

    def close(self) -> None:
        """Ends the tracker's run, and says what it missed."""
        if not self._started:
            return
        self._put(self._tracker.close)
        self._put(None)
        self._thread.join(self._patience)
        self._started = False
        self._tell()
        if self._thread.is_alive():
            self._warn(
                f"did not end within {self._patience:g} s; what it was still to be told is missing there"
            )
        elif self._missed:
            self._warn(f"missed {self._missed} calls in all")

    def _put(self, call: Callable[[], None] | None) -> None:
        if not self._started:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._error = self._error or TimeoutError(f"{WAITING} calls wait for it")
            self._missed += 1
        self._tell()

    def _work(self) -> None:
        """Makes the queued calls, on the tracker's thread."""
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception as error:  # of somebody else's package: anything may come
                self._error = error
                self._missed += 1

    def _tell(self) -> None:
        """Warns of the first failure, on the run's thread."""
        if self._error is not None and not self._told:
            self._told = True
            self._warn(f"failed ({type(self._error).__name__}: {self._error})")

    def _warn(self, what: str) -> None:
        warnings.warn(
            f"The tracker {self._name} {what}. Training goes on; metrics.jsonl has every record.",
            stacklevel=4,
        )
