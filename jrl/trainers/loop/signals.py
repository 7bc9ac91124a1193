# SPDX-License-Identifier: Apache-2.0
"""An orderly end on a signal: finish the iteration, save, exit 0."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import weakref
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from jrl.trainers.loggers.standard_outputs import mute_lost

_ALWAYS = (signal.SIGINT, signal.SIGTERM)
# A connection that is closed, what SLURM and Grid Engine send before they preempt, and a limit of CPU time.
_UNLESS_USED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)


class GracefulStop:
    """While entered, the first SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 or SIGXCPU only sets a flag.

    A loop reads it between two iterations. The handler says so on stderr: an iteration can take minutes. A second
    SIGINT raises `KeyboardInterrupt` at once, for whoever does not want to wait.

    All but the first two are left alone where the program handles or ignores them itself, as under nohup. Outside the
    main thread Python lets nobody install handlers; there it does nothing, and `requested` stays False. A child that is
    forked meanwhile has the previous handlers: it runs no loop that would read the flag.

    Attributes:
      requested: Whether a signal arrived.
      received: Name of the first signal, such as "SIGTERM"; None before.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """True where a signal arrived."""
        return self.received is not None

    def __enter__(self) -> Self:
        """Installs the handlers."""
        if threading.current_thread() is threading.main_thread():
            unused = [number for number in _UNLESS_USED if _is_unused(number)]
            for number in (*_ALWAYS, *unused):
                self._previous[number] = signal.signal(number, self._handle)
            _ENTERED.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Puts the previous handlers back."""
        self.put_back()

    def put_back(self) -> None:
        """Restores the handlers from before; a second call does nothing."""
        for number, handler in self._previous.items():
            # None: something that was not installed from Python, which only it can put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}
        _ENTERED.discard(self)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        mute_lost()  # a signal may be the first word of a terminal that is gone
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is None:
            self.received = signal.Signals(number).name
            text = f"{self.received}: finishing the iteration, then saving. Ctrl-C (again) ends at once.\n"
            with contextlib.suppress(OSError):
                # Not `print`: a handler may interrupt a write to the same buffer.
                os.write(2, text.encode())


_ENTERED: weakref.WeakSet[GracefulStop] = weakref.WeakSet()


def _put_back_in_child() -> None:
    # Ctrl-C reaches a whole process group. A worker of the reward function's pool that died of it would lose its task,
    # and the pool would wait for it: the iteration in progress could not be finished.
    entered = bool(_ENTERED)
    for stop in list(_ENTERED):
        stop.put_back()
    if entered:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


os.register_at_fork(after_in_child=_put_back_in_child)


def _is_unused(number: signal.Signals) -> bool:
    """True where a signal would end the process: nobody handles it, in Python or, as faulthandler does, in C."""
    if signal.getsignal(number) != signal.SIG_DFL:
        return False
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:  # not Linux: then what C has installed cannot be seen
        return True
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is None or not int(caught[1], 16) >> (number - 1) & 1
