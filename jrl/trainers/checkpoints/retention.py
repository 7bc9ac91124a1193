# SPDX-License-Identifier: Apache-2.0
"""Retention of the checkpoints in a run's folder: the newest stay, and the best."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from jrl.trainers.checkpoints.manifest import CheckpointError, read_manifest, verify_manifest
from jrl.trainers.checkpoints.resume import checkpoints_in


class Retention:
    """The checkpoints of a folder and the scores that they carry.

    Args:
      run_dir: The folder.
      keep: Newest ones kept; the best one is kept beside them.
    """

    def __init__(self, run_dir: Path, keep: int) -> None:
        self._keep = keep
        self._paths = checkpoints_in(run_dir)
        self._scores = {step: _score(path) for step, path in self._paths.items()}

    def add(self, step: int, path: Path, score: float | None) -> None:
        """Counts a checkpoint that is there now, and deletes what need not be kept any more.

        A deletion that fails costs room, not the run: what cannot be renamed is tried again the next time, and what
        is left of a deleted one is removed by `recover` when the next run starts.
        """
        self._paths[step], self._scores[step] = path, score
        newest = sorted(self._scores)[-self._keep :]
        for old in [step for step in self._scores if step not in newest and step != self.best_step()]:
            # Half-deleted must not look like a damaged checkpoint.
            doomed = self._paths[old].with_suffix(".tmp")
            try:
                self._paths[old].rename(doomed)
            except FileNotFoundError:
                pass  # somebody else has deleted it
            except OSError:
                continue
            self.forget(old)
            shutil.rmtree(doomed, ignore_errors=True)

    def forget(self, step: int) -> None:
        """Counts a checkpoint no longer."""
        self._paths.pop(step, None)
        self._scores.pop(step, None)

    def best_step(self) -> int | None:
        """First step that carries the highest score; None while none carries one."""
        scored = [(score, -step) for step, score in self._scores.items() if score is not None]
        return -max(scored)[1] if scored else None


def best_checkpoint(run_dir: Path, notify: Callable[[str], None]) -> Path | None:
    """The whole checkpoint with the highest score of a run; None where no evaluation had one, or it is damaged.

    Args:
      run_dir: Folder of a run.
      notify: Told where the best one is not whole.
    """
    step = Retention(run_dir, keep=1).best_step()
    if step is None:
        return None
    path = checkpoints_in(run_dir)[step]
    try:
        verify_manifest(path)
    except CheckpointError as error:
        notify(f"The best checkpoint is not whole: {error} Falling back to the newest.")
        return None
    return path


def _score(path: Path) -> float | None:
    """The score a checkpoint carries; a damaged one carries none."""
    try:
        score: float | None = read_manifest(path)["best_score"]
    except CheckpointError:
        return None
    return score
