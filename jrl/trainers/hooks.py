# SPDX-License-Identifier: Apache-2.0
"""What a caller may watch a run by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def _ignore(_: Any) -> None:
    """The hook of a caller who does not watch."""


@dataclass(frozen=True)
class Hooks:
    """Called on the host, between two updates; what they raise ends the run as any failure does.

    Attributes:
      log: Receives every training record, as `history` holds it.
      evaluate: Receives every evaluation's record.
      save: Receives the folder of a checkpoint whose writing has begun.
    """

    log: Callable[[dict[str, Any]], None] = _ignore
    evaluate: Callable[[dict[str, Any]], None] = _ignore
    save: Callable[[Path], None] = _ignore
