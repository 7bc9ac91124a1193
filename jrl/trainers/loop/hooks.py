# SPDX-License-Identifier: Apache-2.0
"""Hooks by which a caller may watch a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def _ignore(_: Any) -> None:
    """The hook of a caller who does not watch."""


def _never() -> bool:
    """The hook of a caller who does not end a run early."""
    return False


def _nothing() -> dict[str, Any]:
    """The hook of a caller who keeps nothing."""
    return {}


@dataclass(frozen=True)
class Hooks:
    """Called on the host, between two updates; what they raise ends the run as any failure does.

    Attributes:
      log: Receives every training record, as `history` holds it.
      evaluate: Receives every evaluation's record.
      save: Receives the folder of a checkpoint whose writing has begun.
      stop: Asked between two iterations whether the run is to end in order, as after SIGTERM.
      host_state: Gives what a checkpoint must hold of the caller's, plain JSON.
      load_host_state: Receives what `host_state` gave, in a run that resumes; nothing where a checkpoint has none.
    """

    log: Callable[[dict[str, Any]], None] = _ignore
    evaluate: Callable[[dict[str, Any]], None] = _ignore
    save: Callable[[Path], None] = _ignore
    stop: Callable[[], bool] = _never
    host_state: Callable[[], dict[str, Any]] = _nothing
    load_host_state: Callable[[Mapping[str, Any]], None] = _ignore


_UNWATCHED = Hooks()
_WATCHING = ContextVar("watching", default=_UNWATCHED)


def current_hooks() -> Hooks:
    """Hooks that a trainer starts with: those of the `watch` around it, else hooks that ignore everything."""
    return _WATCHING.get()


@contextlib.contextmanager
def watch(hooks: Hooks) -> Iterator[None]:
    """Every trainer that is made inside starts with these hooks: so a caller watches a script that makes its own."""
    token = _WATCHING.set(hooks)
    try:
        yield
    finally:
        _WATCHING.reset(token)
