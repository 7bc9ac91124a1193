# SPDX-License-Identifier: Apache-2.0
"""Warnings of jrl as lines of a command: without the source line, which says nothing to whoever runs it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jrl
from jrl.trainers.loggers.safe_text import for_terminal, one_line

_PACKAGE = Path(jrl.__file__).parent


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Inside, a `UserWarning` of jrl's own is shown as `warning: ...`; every other warning as Python shows it."""
    shown = warnings.formatwarning

    def as_line(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if issubclass(category, UserWarning) and Path(filename).is_relative_to(_PACKAGE):
            return f"warning: {for_terminal(one_line(str(message)))}\n"
        return shown(message, category, filename, lineno, line)

    warnings.formatwarning = as_line
    try:
        yield
    finally:
        warnings.formatwarning = shown
