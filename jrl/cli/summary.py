# SPDX-License-Identifier: Apache-2.0
"""Summary of a training command: its closing line and its exit status."""

from __future__ import annotations

from collections.abc import Callable

from jrl.distributed import is_main
from jrl.trainers.base import Trainer

Work = Callable[[], int | None]
"""What a command does once its flags are understood; a status other than 0 is returned."""


def tell(text: str) -> None:
    """Prints a line, once for all processes of a job; nothing of an empty one."""
    if text and is_main():
        print(text)


def status_of(trainer: Trainer) -> int:
    """1 where the last checkpoint could not be written: with the process goes what was trained since the one before."""
    return int(trainer.unsaved)
