# SPDX-License-Identifier: Apache-2.0
"""Keys of the sampling calls that a script makes: one counter a model, so that no two calls draw alike."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import jax

from jrl.typing import PRNGKey

GENERATION_STREAM, CALL_STREAM = 2, 6
"""What the seed's key is folded with for sampling calls of a script: those that name a seed, those that are counted."""


class _Reseeding:
    """State of the last `reseed`, for all models of the process.

    Attributes:
      seed: Given last; 0 before.
      count: How often one was given.
    """

    def __init__(self) -> None:
        self.seed = self.count = 0
        self._lock = threading.Lock()

    def take(self, seed: int) -> None:
        """Sets the seed and counts that it was given."""
        with self._lock:
            self.seed, self.count = seed, self.count + 1


_LAST = _Reseeding()


def reseed(seed: int) -> None:
    """Makes every model's sampling calls draw from this seed from now on, counted from 0 again."""
    _LAST.take(seed)


class Draws:
    """Keys of a model's sampling calls: a function of the seed and of the number of the call.

    Args:
      seed: None: that of the last `reseed`.

    Attributes:
      calls: Keys drawn so far.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.calls, self._stream = 0, CALL_STREAM
        self._seed = _LAST.seed if seed is None else seed
        self._heeded = _LAST.count

    def key(self) -> PRNGKey:
        """Key of the next call, which no other call has."""
        if self._heeded != _LAST.count:
            self._seed, self._heeded, self.calls, self._stream = _LAST.seed, _LAST.count, 0, CALL_STREAM
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self._seed), self._stream), self.calls)
        self.calls += 1
        return key

    def state(self) -> dict[str, int]:
        """State for a checkpoint, so that the calls after a resume are those that would have come."""
        return {"seed": self._seed, "calls": self.calls, "stream": self._stream}

    def load(self, found: Mapping[str, int]) -> None:
        """Puts back what `state` gave; a `reseed` from before is over.

        Older checkpoints name no stream: their calls had that of the calls that name a seed, and go on there.
        """
        self._seed, self.calls, self._heeded = found["seed"], found["calls"], _LAST.count
        self._stream = found.get("stream", GENERATION_STREAM)
