# SPDX-License-Identifier: Apache-2.0
"""An orderly end on Ctrl-C and SIGTERM: finish the iteration, save, exit 0."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class GracefulStop:
    """While entered, the first SIGINT or SIGTERM only sets a flag that a loop reads between two iterations.

    It says so on stderr: an iteration can take minutes. A second SIGINT raises `KeyboardInterrupt` at once, for
    whoever does not want to wait. Outside the main thread Python lets nobody install handlers; there it does nothing,
    and `requested` stays False.

    Attributes:
      requested: Whether a signal arrived.
      received: Name of the first signal, such as "SIGTERM"; None before.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal arrived."""
        return self.received is not None

    def __enter__(self) -> Self:
        """Installs the handlers."""
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Puts the previous handlers back."""
        for number, handler in self._previous.items():
            # None: something that was not installed from Python, which only it can put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is None:
            self.received = signal.Signals(number).name
            text = f"{self.received}: finishing the iteration, then saving. Ctrl-C (again) ends at once.\n"
            # Not `print`: a handler may interrupt a write to the same buffer.
            os.write(2, text.encode())
