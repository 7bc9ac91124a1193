# SPDX-License-Identifier: Apache-2.0
"""The records of trainers that a script steps, and the watch that says once each what they show to be wrong."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from jrl.trainers.loggers import RULES, Watch, say


class WatchedHistory:
    """The records of calls of `step`; what a run of `jrl.train` would say of them is a warning here.

    Args:
      history: Where records are kept, findings among them; those that are there are not said again.
      watch: Whether anything is looked for.
    """

    def __init__(self, history: list[dict[str, Any]], *, watch: bool) -> None:
        self._history = history
        self._watch = Watch(history, RULES if watch else ())

    def state(self) -> dict[str, Any]:
        """State of the watch, as plain JSON."""
        return self._watch.state()

    def load(self, found: Mapping[str, Any]) -> None:
        """Puts back what `state` gave: baselines, windows, and what is not to be said again."""
        self._watch.load(found)

    def add(self, record: dict[str, Any]) -> None:
        """Adds a record, with the findings that it completes.

        Args:
          record: Of one call of `step`, with its `step` and `iteration`.
        """
        self._history.append(record)
        for finding in self._watch.see(record):
            found = finding.record()
            self._history.append(found)
            warnings.warn(say(found), stacklevel=3)
