# SPDX-License-Identifier: Apache-2.0
"""Work in progress in words: the program that is being compiled, else the innermost part of the stopwatch.

How long a program took to compile is kept beside the compiled programs, so that the next run can say it.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import jax

from jrl.trainers.loop.stopwatch import CompileCounter, Stopwatch

QUIET_SECONDS = 10.0
"""A run that has said nothing for so long says what it is doing."""
SECONDS_FILE = "seconds.json"
_WORTH_KEEPING = (
    1.0  # seconds; what is read from the cache takes less, and must not replace what compiling took
)
_PROGRAMS = {
    "update": "the update",
    "generate": "sampling",
    "join_and_score": "scoring",
    "assemble": "the batch",
    "measure": "the evaluation",
    "init": "the first state",
}
_PARTS = {
    "rollout": "sampling",
    "decode": "decoding completions",
    "reward": "waiting for the reward function",
    "evaluation": "evaluating",
    "data": "reading data",
    "ahead": "waiting for rollouts",
}


class Activity:
    """Tells what a run is doing.

    Args:
      stopwatch: Of the run.
      compilations: Likewise.
      model: What programs are of, for the times of earlier runs.
    """

    def __init__(self, stopwatch: Stopwatch, compilations: CompileCounter, model: str) -> None:
        self._stopwatch, self._compilations, self._model = stopwatch, compilations, model
        folder = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
        self._file = None if folder is None else Path(folder) / SECONDS_FILE
        self._before = self._read()

    def now(self) -> str:
        """Such as "compiling the update, 12 s (38 s last time)", or "sampling, 3 s"."""
        compiling = self._compilations.running
        if compiling is not None:
            name, began = compiling
            before = self._before.get(self._key(name))
            last_time = "" if before is None else f" ({before:.0f} s last time)"
            what = _PROGRAMS.get(name, name)
            return f"compiling {what}, {time.perf_counter() - began:.0f} s{last_time}"
        running = tuple(self._stopwatch.running)  # another thread may end a part meanwhile
        if not running:
            return "updating"
        name, began = running[-1]
        return f"{_PARTS.get(name, name)}, {time.perf_counter() - began:.0f} s"

    def keep(self) -> None:
        """Keeps how long programs took, for the next run; what cannot be written is only not known then."""
        took = {
            self._key(name): round(seconds, 1)
            for name, seconds in self._compilations.took.items()
            if seconds > _WORTH_KEEPING
        }
        if self._file is None or not took:
            return
        with suppress(OSError):
            self._file.write_text(json.dumps(self._read() | took), encoding="utf-8")

    def _key(self, name: str) -> str:
        return f"{name} of {self._model}"

    def _read(self) -> dict[str, float]:
        if self._file is None:
            return {}
        with suppress(OSError, ValueError):
            found = json.loads(self._file.read_text(encoding="utf-8"))
            if isinstance(found, dict):
                return {str(key): float(value) for key, value in found.items()}
        return {}


@contextmanager
def says_what_takes_long(what: str, *, quiet_seconds: float = QUIET_SECONDS) -> Iterator[None]:
    """Inside, a line on stderr says every so often that something is still going on.

    Args:
      what: Such as "loading model and data".
      quiet_seconds: Between two lines.
    """
    over, began = threading.Event(), time.monotonic()

    def tell() -> None:
        while not over.wait(quiet_seconds):
            print(f"still {what}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)

    thread = threading.Thread(target=tell, name="says_what_takes_long", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
