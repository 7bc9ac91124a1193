# SPDX-License-Identifier: Apache-2.0
"""What a worker says to `benchmarks/compare.py`. Every peer's environment imports it: the standard library alone.

A worker prints "ready" once it is warm; then, for every line on stdin, it runs twice and prints the seconds of the
second time. While the other one has its turn the system takes back the memory that this one freed, and a first run
after that pays for having it again, which no run of many steps in a row does.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable


def say_ready() -> None:
    """The worker has warmed up."""
    print("ready", flush=True)


def is_asked() -> bool:
    """Waits for a line; whether one came, and not the end of stdin."""
    return bool(sys.stdin.readline())


def say_seconds(seconds: float) -> None:
    """A run is done."""
    print(seconds, flush=True)


def answer(run: Callable[[], object]) -> None:
    """Measures until nobody asks any more; the worker is warm.

    Args:
      run: Does the work once, and returns when it is done.
    """
    say_ready()
    while is_asked():
        run()
        begin = time.perf_counter()
        run()
        say_seconds(time.perf_counter() - begin)
