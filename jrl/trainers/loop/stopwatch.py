# SPDX-License-Identifier: Apache-2.0
"""Clocks and counters of a run: what `time/*` and `perf/*` report. Excluded from every exactness promise."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import jax

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_LOWERED_EVENT = "/jax/core/compile/jaxpr_to_mlir_module_duration"  # what the compiler gets next


class CompileCounter:
    """Counts XLA compilations in this process while entered.

    A run that recompiles after its first iterations is a defect of shapes, so `perf/compilations` is always logged.

    Attributes:
      count: Programs, those that were read from the cache among them.
      seconds: What they took.
      running: Name of the program that is being compiled, and since when by `time.perf_counter`; None: none is.
      took: Seconds of the last compilation of each program, by name.
    """

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0
        self.running: tuple[str, float] | None = None
        self.took: dict[str, float] = {}

    def __enter__(self) -> Self:
        """Starts to listen."""
        jax.monitoring.register_event_duration_secs_listener(self._heard)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Listens no more: a process may hold many runs."""
        jax.monitoring.unregister_event_duration_listener(self._heard)

    def _heard(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        name = str(kwargs.get("fun_name", "a program")).removeprefix("jit(").removesuffix(")")
        if event == _LOWERED_EVENT:
            self.running = name, time.perf_counter()
        elif event == _COMPILE_EVENT:
            self.count, self.seconds = self.count + 1, self.seconds + duration_secs
            self.running, self.took[name] = None, duration_secs


class Stopwatch:
    """Adds up seconds by name; `take` returns them as `time/<name>` and starts anew.

    Attributes:
      running: Names that are being measured, the innermost last, and since when by `time.perf_counter`.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self.running: list[tuple[str, float]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measures the block."""
        start = time.perf_counter()
        self.running.append((name, start))
        try:
            yield
        finally:
            self.running.remove((name, start))
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Adds what was measured elsewhere."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def merge(self, other: Stopwatch) -> None:
        """Adds what another one measured, which begins anew."""
        for name, seconds in other._seconds.items():
            self.add(name, seconds)
        other._seconds.clear()

    def take(self) -> dict[str, float]:
        """The sums so far, and empties them."""
        taken = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds = {}
        return taken
