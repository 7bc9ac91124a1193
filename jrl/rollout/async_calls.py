# SPDX-License-Identifier: Apache-2.0
"""Async functions of the user's, run together on one event loop.

The loop runs in a background thread. So a notebook's own loop is not in the way, and clients that a function keeps
(connection pools belong to the loop that they were made on) work from call to call. It stays for as long as the process
does, unless a function holds it without awaiting anything: then the next calls get another one, and it ends when it is
free again.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

Outcome = tuple[Any, BaseException | None]
"""What a function answered, and what it raised instead."""
LATE_SECONDS = 0.1
"""How long behind a time limit a loop may be before it counts as held by the call that runs then."""
GRACE_SECONDS = 1.0
"""How long it may be held beyond that before it is given up."""
HELD_SHARE = 0.25
"""Of a time limit: a call that holds the loop for as long as that has kept the others waiting."""
_NAME: ContextVar[str | None] = ContextVar("name of a call", default=None)
"""Of the call that a task belongs to: tasks that a function makes copy the context of the one that makes them."""


class _Loop:
    """An event loop in a background thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_task_factory(self._new_task)
        self._names: weakref.WeakKeyDictionary[asyncio.Task[Any], str | None] = weakref.WeakKeyDictionary()
        # A daemon: a call that never returns must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="reward_fn", daemon=True)
        self._thread.start()
        self._num_calls = 0
        atexit.register(self.close)

    def close(self) -> None:
        """Stops the loop, unless a call blocks it."""
        self.stop_when_free()
        self._thread.join(GRACE_SECONDS)

    def enter(self) -> None:
        """Counts a call that runs on it."""
        self._num_calls += 1

    def leave(self, *, given_up: bool) -> None:
        """Counts such a call off; `given_up`: none comes after it, so the loop ends with the last one."""
        self._num_calls -= 1
        if given_up and not self._num_calls:
            self.stop_when_free()

    def stop_when_free(self) -> None:
        """Has the loop end once no call blocks it; nothing may be run on it any more."""
        atexit.unregister(self.close)
        self.loop.call_soon_threadsafe(self.loop.stop)

    def holder(self) -> str | None:
        """The call whose code runs at this moment; None if there is none, or it is a callback that no task runs."""
        task = asyncio.current_task(self.loop)
        return None if task is None else self._names.get(task)

    def _run(self) -> None:
        self.loop.run_forever()
        try:
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            if left:
                self.loop.run_until_complete(asyncio.wait(left, timeout=GRACE_SECONDS))
        finally:
            self.loop.close()

    def _new_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        """As asyncio makes one, whose options differ from Python to Python."""
        task = asyncio.Task(coroutine, loop=loop, **options)
        self._names[task] = _NAME.get()
        return task


_CURRENT: list[_Loop] = []
"""The loop of this process, once there is one."""
_CURRENT_LOCK = threading.Lock()
"""For it, and for how many calls each loop has."""


def await_together(
    calls: Mapping[str, Callable[[], Awaitable[Any]]],
    timeout: float | None,
    *,
    too_late: Callable[[str, bool], BaseException],
    failures: tuple[type[BaseException], ...],
) -> dict[str, Outcome]:
    """Awaits calls together.

    Where one of them holds the loop when the time is over, or has held it for a good share of the time, those of the
    others that are late are called once more, without it. So a call may take the time limit, and `GRACE_SECONDS`, once
    more for each that holds the loop.

    Args:
      calls: By name.
      timeout: Seconds that each may take; None waits for ever. One that takes longer is cancelled.
      too_late: (name, whether the loop was held, by this call or by what belongs to none) → the failure of such a call.
      failures: What a call may raise that is its failure; anything else is raised here.
    Returns:
      The outcome of each, in the order of the calls.
    """
    outcomes: dict[str, Outcome] = {}
    given_up = threading.Event()

    async def one(name: str, call: Callable[[], Awaitable[Any]]) -> None:
        if given_up.is_set():  # it waited behind the call that held the loop, and is called on another one
            return
        try:
            outcomes.setdefault(name, (await call(), None))
        except BaseException as error:  # raised again in the caller's thread; here it would end the loop
            outcomes.setdefault(name, (None, error))

    async def everyone() -> list[str]:
        tasks = {}
        for name, call in calls.items():
            _NAME.set(name)
            tasks[name] = asyncio.ensure_future(one(name, call))
        await asyncio.wait(tasks.values(), timeout=timeout)
        late = [name for name, task in tasks.items() if not task.done()]
        for name in late:
            outcomes.setdefault(name, (None, too_late(name, False)))
            tasks[name].cancel()
        return late

    with _current() as loop:
        late, holder = _watched(loop, asyncio.run_coroutine_threadsafe(everyone(), loop.loop), timeout)
        if late is None:
            given_up.set()
            _give_up(loop)
    found = dict(outcomes)  # a loop that was given up may go on to write
    for _, error in found.values():
        if error is not None and not isinstance(error, failures):
            raise error
    held = late is None or holder is not None
    late = [name for name in calls if name not in found] if late is None else late
    again = {name: calls[name] for name in late if holder in calls and name != holder}
    for name in late:
        found[name] = (None, too_late(name, held))
    if again:
        found |= await_together(again, timeout, too_late=too_late, failures=failures)
    return {name: found[name] for name in calls}


def _watched(
    loop: _Loop, done: concurrent.futures.Future[list[str]], timeout: float | None
) -> tuple[list[str] | None, str | None]:
    """The calls that are late, None if the loop is held too long to say, and the call that held it."""
    held: dict[str, float] = defaultdict(float)  # seconds of each call
    over: str | None = None  # the call that held it when the time was over
    try:
        if timeout is None:
            return done.result(), None
        seen = time.monotonic()
        at_limit = seen + timeout + LATE_SECONDS
        while seen < at_limit + GRACE_SECONDS:
            try:
                late = done.result(min(LATE_SECONDS, timeout / 10))
            except concurrent.futures.TimeoutError:
                holder, before, seen = loop.holder(), seen, time.monotonic()
                if holder is not None:
                    held[holder] += seen - before
                    over = over or (holder if seen > at_limit else None)
                continue
            long = [name for name, seconds in held.items() if seconds >= HELD_SHARE * timeout]
            return late, over or max(long, key=lambda name: held[name], default=None)
    except BaseException:  # an interrupt
        done.cancel()
        raise
    return None, over


@contextlib.contextmanager
def _current() -> Iterator[_Loop]:
    """The loop of this process, for one call. One that is given up ends when the last of its calls does."""
    with _CURRENT_LOCK:
        if not _CURRENT:
            _CURRENT.append(_Loop())
        loop = _CURRENT[0]
        loop.enter()
    try:
        yield loop
    finally:
        with _CURRENT_LOCK:
            loop.leave(given_up=loop not in _CURRENT)


def _give_up(loop: _Loop) -> None:
    """Has the next calls run on another loop."""
    with _CURRENT_LOCK:
        if loop in _CURRENT:
            _CURRENT.remove(loop)
