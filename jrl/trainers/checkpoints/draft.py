# SPDX-License-Identifier: Apache-2.0
"""A checkpoint on its way to the disk: all processes write into one folder, and process 0 makes it whole.

Process 0 makes the folder aside, each process writes its shards there and leaves a note of what it wrote, or of why it
could not; process 0 adds what is written once, and the manifest, and renames the folder. The processes meet before and
after the writing of the shards, not on a device: the writing goes on beside the training.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from jrl.distributed import is_main, meet, new_meeting
from jrl.trainers.checkpoints.manifest import (
    CheckpointError,
    fingerprint_files,
    missing_files,
    sync_directory,
    write_manifest,
)
from jrl.trainers.checkpoints.state_io import finish_write, own_files, start_write

STATE, MODEL = "state", "hf_model"
LATE_SECONDS = 70
"""How late a network file system may show what another host has written: NFS, unless told otherwise, lets a client
believe for 60 s what it knows of a folder."""


class PartError(CheckpointError):
    """A process could not go on because of another; that one's error says why."""


class LateError(PartError):
    """A file of another process does not show here in time: the file system's fault."""


class Draft:
    """A checkpoint from `start` to `finish`. All processes make one and call both, on the writer's thread.

    Args:
      target: The checkpoint's folder, which exists once all is done.
    """

    def __init__(self, target: Path) -> None:
        self._target, self._aside = target, target.with_suffix(".tmp")
        self._begun, self._written = new_meeting(), new_meeting()
        self._failure: Exception | None = None
        self._write_state: Callable[[], None] = lambda: None

    def start(self, arrays: Mapping[str, Any] | None) -> None:
        """Makes the folder and brings to the host what this process will write: afterwards all may be donated.

        What fails here is told by `finish`.

        Args:
          arrays: As `fetch_state` gives them; None: no state is stored.
        """
        try:
            if is_main():
                shutil.rmtree(self._aside, ignore_errors=True)
                (self._aside / STATE if arrays is not None else self._aside).mkdir(parents=True)
        except OSError as error:
            self._failure = error
        meet(self._begun)
        try:
            if self._failure is None and arrays is not None:
                if not appears(self._aside / STATE):
                    raise LateError(
                        f"Process {jax.process_index()} does not see {self._aside}, which process 0 made. Do the hosts "
                        "share `train.checkpoint_dir`?"
                    )
                self._write_state = start_write(self._aside / STATE, arrays)
        except Exception as error:  # a full disk, a lost device: `finish` tells it, where no process waits
            self._failure = error

    def finish(
        self,
        *,
        write_model: Callable[[Path], None],
        content: Mapping[str, str],
        entries: Mapping[str, Any],
    ) -> None:
        """Writes it all and makes it whole.

        Args:
          write_model: As for `Checkpointer.save`.
          content: Text files, by name.
          entries: Of the manifest.
        Raises:
          Exception: What went wrong in this process; in process 0, in any. Then nothing is left of it.
        """
        try:
            self._write_own()
            meet(self._written)
            if not is_main():
                if self._failure is not None:
                    raise self._failure
                return
            known = self._join_parts()
            write_model(self._aside / MODEL)
            for name, text in content.items():
                (self._aside / name).write_text(text, encoding="utf-8")
            write_manifest(self._aside, entries, known)
            self._publish()
        except BaseException:
            if is_main():
                shutil.rmtree(self._aside, ignore_errors=True)
            raise

    def _write_own(self) -> None:
        """This process's shards, and for process 0 the note that says how it went."""
        try:
            if self._failure is None:
                self._write_state()
        except Exception as error:  # as in `start`: the note tells process 0
            self._failure = error
        if is_main():
            return
        note: dict[str, Any] = {"failure": None if self._failure is None else str(self._failure)}
        try:
            if self._failure is None:
                note["files"] = fingerprint_files(self._aside, own_files(self._aside / STATE))
            self._note(jax.process_index()).write_text(json.dumps(note), encoding="utf-8")
        except OSError as error:  # a disk that refuses the note has refused the rest
            self._failure = self._failure or error

    def _join_parts(self) -> dict[str, Any]:
        """Makes one state of what all processes wrote; the fingerprints that they took.

        Raises:
          Exception: This process's failure.
          PartError: Because of another's, or where what that one wrote does not show here.
        """
        if self._failure is not None:
            raise self._failure
        known: dict[str, Any] = {}
        for number in range(1, jax.process_count()):
            path = self._note(number)
            if not appears(path):
                raise LateError(f"Process {number} could not write its part, nor say why.")
            note = json.loads(path.read_text(encoding="utf-8"))
            if note["failure"] is not None:
                raise PartError(f"Process {number} could not write its part: {note['failure']}")
            self._await(number, note["files"])
            known |= note["files"]
            path.unlink()
        if (self._aside / STATE).exists():
            finish_write(self._aside / STATE)
        return known

    def _await(self, number: int, files: Mapping[str, Any]) -> None:
        """Waits until the folder shows what a process has written: Orbax joins what it finds, and misses nothing."""
        if not comes_true(lambda: not missing_files(self._aside, files)):
            names = ", ".join(missing_files(self._aside, files)[:3])
            raise LateError(
                f"Process {number} wrote {names} in {self._aside}, but process 0 does not see it whole "
                f"{LATE_SECONDS} s later"
            )

    def _note(self, number: int) -> Path:
        return self._aside / f"process_{number}.json"

    def _publish(self) -> None:
        """The one rename that makes a checkpoint exist; saving a step again replaces it."""
        replaced = self._target.with_suffix(".replaced")
        if self._target.exists():
            self._target.rename(replaced)
        self._aside.rename(self._target)
        sync_directory(self._target.parent)
        shutil.rmtree(replaced, ignore_errors=True)


def appears(path: Path) -> bool:
    """True where a path that another process made is there, or comes in time."""
    return comes_true(path.exists)


def comes_true(is_so: Callable[[], bool]) -> bool:
    """True where the work of another process shows here within `LATE_SECONDS`."""
    end = time.monotonic() + LATE_SECONDS
    while not is_so():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True
