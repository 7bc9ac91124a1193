# SPDX-License-Identifier: Apache-2.0
"""A run's folder: locked while a run works in it, and put in order when the next one begins."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO

from jrl.trainers.manifest import CheckpointError
from jrl.trainers.resume import LOCK, checkpoints_in


def lock(run_dir: Path) -> IO[str]:
    """Takes the folder's lock; the kernel gives it back when the process ends, however it ends.

    Raises:
      CheckpointError: If another process holds it.
    """
    file = (run_dir / LOCK).open("a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise CheckpointError(
            f"Another run is working in {run_dir} (it holds {LOCK}). Wait for it, or set `train.checkpoint_dir`."
        ) from error
    return file


def recover(run_dir: Path, notify: Callable[[str], None]) -> None:
    """Undoes what a killed run left half-done, and says so where that cost a checkpoint."""
    for path in run_dir.glob("checkpoint_*.replaced"):  # killed between the two renames of a step saved again
        original = path.with_suffix("")
        if original.exists():
            shutil.rmtree(path)
        else:
            path.rename(original)
    for path in run_dir.glob("checkpoint_*.tmp"):
        shutil.rmtree(path)
        whole = ", ".join(found.name for found in checkpoints_in(run_dir).values())
        notify(
            f"{path.name} was left half-written by a run that was killed; it is removed. Complete checkpoints: "
            f"{whole or 'none'}."
        )
