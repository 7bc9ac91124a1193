# SPDX-License-Identifier: Apache-2.0
"""trlX's `logging`: the standard library's loggers under the name of this package.

Every message begins with `[RANK n]`, and by default only rank 0 speaks. The environment decides: `RANK` is this
process's number, `TRLX_VERBOSITY` the level at the start, and `TRLX_NO_ADVISORY_WARNINGS` silences advice.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, MutableMapping
from logging import CRITICAL, DEBUG, ERROR, FATAL, INFO, NOTSET, WARN, WARNING
from typing import Any

from jrl.interop import warn_ignored

__all__ = [
    "CRITICAL",
    "DEBUG",
    "ERROR",
    "FATAL",
    "INFO",
    "NOTSET",
    "WARN",
    "WARNING",
    "add_handler",
    "disable_default_handler",
    "disable_progress_bar",
    "disable_propagation",
    "enable_default_handler",
    "enable_explicit_format",
    "enable_progress_bar",
    "enable_propagation",
    "get_log_levels_dict",
    "get_logger",
    "get_verbosity",
    "is_progress_bar_enabled",
    "remove_handler",
    "reset_format",
    "set_verbosity",
]

LEVELS: Mapping[str, int] = {
    "debug": DEBUG,
    "info": INFO,
    "warning": WARNING,
    "error": ERROR,
    "critical": CRITICAL,
}
ROOT = "jrl"
EXPLICIT_FORMAT = "[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s"

_default_handler: logging.Handler | None = None
_progress_bars = True


class RankLogger(logging.LoggerAdapter):  # type: ignore[type-arg]  # generic only in the stubs of Python 3.11
    """A logger whose messages name this process's rank, and which stays silent on all ranks but those asked for."""

    def log(  # type: ignore[override]  # one keyword more
        self, level: int, msg: object, *args: object, ranks: list[str] | None = None, **kwargs: Any
    ) -> None:
        """Logs on the given ranks.

        Args:
          level: Such as `logging.INFO`.
          msg: With `%` places for `args`.
          *args: Fill the places.
          ranks: Ranks that log, as texts; default rank 0. An empty list is all of them.
          **kwargs: Of `logging.Logger.log`.
        """
        spoken = ["0"] if ranks is None else [str(rank) for rank in ranks]
        if self.isEnabledFor(level) and (not spoken or _rank() in spoken):
            # One frame more than usual: the explicit format names the caller, not this method.
            super().log(level, msg, *args, **({"stacklevel": 2} | kwargs))

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Puts the rank before the message."""
        return f"[RANK {_rank()}] {msg}", kwargs

    def warning_advice(self, msg: object, *args: object, **kwargs: Any) -> None:
        """A warning that `TRLX_NO_ADVISORY_WARNINGS` silences; arguments as in `log`."""
        if not os.environ.get("TRLX_NO_ADVISORY_WARNINGS"):
            self.log(WARNING, msg, *args, **({"stacklevel": 3} | kwargs))


def get_log_levels_dict() -> dict[str, int]:
    """Level of each name that `TRLX_VERBOSITY` takes."""
    return dict(LEVELS)


def get_logger(name: str | None = None) -> RankLogger:
    """A logger; loggers of other names than this package's have no level and no handler of their own.

    Args:
      name: Such as `__name__`; default: this package's.
    """
    _root()
    return RankLogger(logging.getLogger(name or ROOT), {})


def get_verbosity() -> int:
    """Level of this package's loggers."""
    return _root().getEffectiveLevel()


def set_verbosity(verbosity: int) -> None:
    """Sets the level of this package's loggers, such as `logging.WARNING`."""
    _root().setLevel(verbosity)


def enable_default_handler() -> None:
    """Writes to the standard error, as at the start."""
    root = _root()
    assert _default_handler is not None
    root.addHandler(_default_handler)


def disable_default_handler() -> None:
    """Stops writing to the standard error."""
    root = _root()
    assert _default_handler is not None
    root.removeHandler(_default_handler)


def add_handler(handler: logging.Handler) -> None:
    """Adds a handler to this package's loggers."""
    _root().addHandler(handler)


def remove_handler(handler: logging.Handler) -> None:
    """Removes a handler that was added.

    Raises:
      ValueError: If it was not.
    """
    root = _root()
    if handler not in root.handlers:
        raise ValueError(f"`handler` must be one of {root.handlers}, got {handler!r}.")
    root.removeHandler(handler)


def enable_propagation() -> None:
    """Hands messages on to Python's root logger too; disable the default handler where that one prints."""
    _root().propagate = True


def disable_propagation() -> None:
    """Keeps messages to this package's handlers, as at the start."""
    _root().propagate = False


def enable_explicit_format() -> None:
    """Time, level, file, line and function before each message, on all handlers that are there now."""
    for handler in _root().handlers:
        handler.setFormatter(logging.Formatter(EXPLICIT_FORMAT))


def reset_format() -> None:
    """The plain message again, on all handlers that are there now."""
    for handler in _root().handlers:
        handler.setFormatter(None)


def is_progress_bar_enabled() -> bool:
    """True where progress bars are on, as set last."""
    return _progress_bars


def enable_progress_bar() -> None:
    """Accepted: the console shows a run's progress wherever it is a terminal."""
    _set_progress_bar(True)


def disable_progress_bar() -> None:
    """Accepted, and without effect: the console shows a run's progress wherever it is a terminal."""
    warn_ignored("logging.disable_progress_bar()", "a run draws its bar only where the output is a terminal")
    _set_progress_bar(False)


def _set_progress_bar(enabled: bool) -> None:
    global _progress_bars
    _progress_bars = enabled


def _rank() -> str:
    return os.environ.get("RANK", "0")


def _root() -> logging.Logger:
    """This package's logger, made ready on first use."""
    global _default_handler
    root = logging.getLogger(ROOT)
    if _default_handler is None:
        _default_handler = logging.StreamHandler()
        root.addHandler(_default_handler)
        root.propagate = False
        asked = os.environ.get("TRLX_VERBOSITY", "info").lower()
        root.setLevel(LEVELS.get(asked, INFO))
        if asked not in LEVELS:
            root.warning("TRLX_VERBOSITY must be one of %s, got %r: info is used.", ", ".join(LEVELS), asked)
    return root
