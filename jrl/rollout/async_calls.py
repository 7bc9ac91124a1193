# SPDX-License-Identifier: Apache-2.0
"""Async functions of the user's, run together on one event loop.

The loop runs in a background thread for as long as the process does. So a notebook's own loop is not in the way, and
clients that a function keeps (connection pools belong to the loop that they were made on) work from call to call.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

Outcome = tuple[Any, BaseException | None]
"""What a function answered, and what it raised instead."""
GRACE_SECONDS = 1.0
"""How long behind its time limit a loop may be before it counts as blocked."""


class _Loop:
    """An event loop in a background thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        # A daemon: a call that never returns must not keep the process from ending.
        self._thread = threading.Thread(target=self.loop.run_forever, name="reward_fn", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Stops the loop, unless a call blocks it."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(GRACE_SECONDS)
        if not self._thread.is_alive():
            self.loop.close()


_CURRENT: list[_Loop] = []
"""The loop of this process, once there is one."""


def await_together(
    calls: Mapping[str, Callable[[], Awaitable[Any]]],
    timeout: float | None,
    *,
    too_late: Callable[[str], BaseException],
    failures: tuple[type[BaseException], ...],
) -> dict[str, Outcome]:
    """Awaits calls together.

    Args:
      calls: By name.
      timeout: Seconds that each may take; None waits for ever. One that takes longer is cancelled.
      too_late: (name) → the failure of such a call.
      failures: What a call may raise that is its failure; anything else is raised here.
    Returns:
      The outcome of each, in the order of the calls.
    """
    outcomes: dict[str, Outcome] = {}

    async def one(name: str, call: Callable[[], Awaitable[Any]]) -> None:
        try:
            outcomes.setdefault(name, (await call(), None))
        except BaseException as error:  # raised again in the caller's thread; here it would end the loop
            outcomes.setdefault(name, (None, error))

    async def everyone() -> None:
        tasks = {name: asyncio.ensure_future(one(name, call)) for name, call in calls.items()}
        await asyncio.wait(tasks.values(), timeout=timeout)
        for name, task in tasks.items():
            if not task.done():
                outcomes.setdefault(name, (None, too_late(name)))
                task.cancel()

    loop = _current()
    done = asyncio.run_coroutine_threadsafe(everyone(), loop.loop)
    try:
        done.result(None if timeout is None else timeout + GRACE_SECONDS)
    except concurrent.futures.TimeoutError:
        # A call holds the thread without awaiting anything: the next ones get another loop.
        _CURRENT.clear()
        for name in calls:
            outcomes.setdefault(name, (None, too_late(name)))
    except BaseException:  # an interrupt
        done.cancel()
        raise
    for _, error in outcomes.values():
        if error is not None and not isinstance(error, failures):
            raise error
    return {name: outcomes[name] for name in calls}


def _current() -> _Loop:
    if not _CURRENT:
        _CURRENT.append(_Loop())
    return _CURRENT[0]
