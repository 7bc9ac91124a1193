# SPDX-License-Identifier: Apache-2.0
"""A run's folder: locked while a run works in it, and put in order when the next one begins."""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import IO

from jrl.trainers.checkpoints.draft import comes_true
from jrl.trainers.checkpoints.manifest import CheckpointError
from jrl.trainers.checkpoints.regular_files import is_at, open_file, read_text
from jrl.trainers.checkpoints.resume import LOCK, checkpoints_in
from jrl.trainers.config.sections import TrainConfig


class InUseError(CheckpointError):
    """Another run works in the folder."""


def lock(run_dir: Path) -> IO[str]:
    """Makes the folder and takes its lock; the kernel gives it back when the process ends, however it ends.

    A child that is forked meanwhile lets go of it: else it would keep the folder for as long as it lives.

    Raises:
      InUseError: If another process holds it.
      CheckpointError: If nothing can be written there.
    """
    while True:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            file = os.fdopen(
                open_file(run_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_APPEND), "a", encoding="utf-8"
            )
        except OSError as error:
            raise CheckpointError(
                f"Nothing can be written to the run's folder {run_dir} ({error}). Set `train.checkpoint_dir` to one of "
                "your own."
            ) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise InUseError(
                f"Another run is working in {run_dir} (it holds {LOCK}). Wait for it, or set `train.checkpoint_dir`."
            ) from error
        if is_at(file.fileno(), run_dir / LOCK):
            _HELD.add(file)
            return file
        file.close()  # deleted between the two: what is locked is nobody's any more


_HELD: weakref.WeakSet[IO[str]] = weakref.WeakSet()


def _let_go_in_child() -> None:
    for file in list(_HELD):
        file.close()


os.register_at_fork(after_in_child=_let_go_in_child)


def refuse_others(run_dir: Path) -> None:
    """Keeps a fresh run out of a folder that holds checkpoints.

    Raises:
      CheckpointError: Naming them, and the ways out.
    """
    present = checkpoints_in(run_dir)
    if present:
        names = ", ".join(path.name for path in present.values())
        raise CheckpointError(
            f"`train.checkpoint_dir`: {run_dir} holds checkpoints of an earlier run ({names}). To continue it, set "
            f"`train.resume_from_checkpoint: {run_dir}`. To delete them, set `train.overwrite: true`. For a new run "
            "beside it, set `train.checkpoint_dir` to another folder."
        )


def refuse_before_loading(train: TrainConfig) -> None:
    """Keeps a fresh run out of a folder that holds checkpoints, before its model and data are loaded.

    The run looks again when it takes the folder: this saves the wait.

    Args:
      train: Of the run. Where it resumes or overwrites, nothing is refused here.
    Raises:
      CheckpointError: As `refuse_others`.
      InUseError: If another run works there.
    """
    run_dir = Path(train.checkpoint_dir).absolute()
    if train.overwrite or train.resume_from_checkpoint is not None or not checkpoints_in(run_dir):
        return
    with lock(run_dir):
        refuse_others(run_dir)


def leave_sign(held: IO[str]) -> str:
    """Writes into the lock file that process 0 holds a word by which the others know the folder."""
    sign = uuid.uuid4().hex
    held.truncate(0)
    held.write(sign)
    held.flush()
    os.fsync(held.fileno())  # a network file system may keep what is only flushed on this host
    return sign


def see_sign(run_dir: Path, sign: str) -> CheckpointError | None:
    """None if this process sees the folder in which process 0 left this sign; else the error to tell the others.

    An earlier run's sign is no answer yet: this host may still show what the file held before.
    """
    if comes_true(lambda: _content(run_dir / LOCK) == sign):
        return None
    return CheckpointError(
        f"it does not see the {run_dir} that process 0 works in. All hosts must share `train.checkpoint_dir`: "
        "checkpoints are written there by all of them."
    )


def recover(run_dir: Path, notify: Callable[[str], None]) -> None:
    """Undoes what an earlier run left half-done, written or deleted, and says which checkpoints are whole."""
    for path in run_dir.glob("checkpoint_*.replaced"):  # killed between the two renames of a step saved again
        original = path.with_suffix("")
        if original.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.rename(original)
    for path in run_dir.glob("checkpoint_*.tmp"):
        shutil.rmtree(path, ignore_errors=True)
        outcome = "cannot be removed: delete it by hand" if path.exists() else "is removed"
        whole = ", ".join(found.name for found in checkpoints_in(run_dir).values())
        notify(
            f"{path.name} was left half-written or half-deleted by an earlier run; it {outcome}. Complete "
            f"checkpoints: {whole or 'none'}."
        )


def _content(path: Path) -> str | None:
    """A text file's content, None where there is none to read."""
    try:
        return read_text(path)
    except OSError:
        return None
