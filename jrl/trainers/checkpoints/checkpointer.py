# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are either whole or not there: written aside, fingerprinted, renamed once.

Orbax stores the arrays. What it leaves to its caller is done here: it restores flipped bits without a word,
refuses to save below its newest step by returning False, and keeping its newest two by score can delete the
newest one. `docs/checkpoints.md` has the layout and the rules.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import jax
import yaml

from jrl.distributed import from_main, gather, is_main, on_main
from jrl.trainers.checkpoints.draft import MODEL as MODEL
from jrl.trainers.checkpoints.draft import STATE as STATE
from jrl.trainers.checkpoints.draft import Draft, LateError, PartError
from jrl.trainers.checkpoints.manifest import CheckpointError, read_manifest
from jrl.trainers.checkpoints.manifest import tree_sha256 as tree_sha256
from jrl.trainers.checkpoints.regular_files import is_at
from jrl.trainers.checkpoints.resume import (
    LOCK,
    check_config,
    check_environment,
    checkpoints_in,
    environment_record,
    find_checkpoint,
    may_resume,
    plain,
)
from jrl.trainers.checkpoints.retention import Retention
from jrl.trainers.checkpoints.run_folder import InUseError, leave_sign, lock, recover, refuse_others, see_sign
from jrl.trainers.checkpoints.state_io import disk_is_at_fault, fetch_state, read_state
from jrl.trainers.config.secrets import without_secrets

CONFIG, CURSOR = "config.yaml", "cursor.json"
DISK, PEER, OTHER = "disk", "peer", "other"


@dataclass(frozen=True)
class Restored:
    """A restored checkpoint.

    Attributes:
      state: The state, placed as the one it was asked for.
      cursor: What the trainer had put beside it.
      path: The checkpoint's folder.
      step: Optimizer step of the checkpoint.
    """

    state: Any
    cursor: dict[str, Any]
    path: Path
    step: int


class Checkpointer:
    """The checkpoints of one run folder, which it locks against a second run.

    Args:
      run_dir: Made where it does not exist.
      keep: Newest checkpoints kept; the best one is kept beside them.
      overwrite: Whether a fresh run may delete the checkpoints that the folder holds.
      resume_from: A run's folder (its newest whole checkpoint is taken) or one checkpoint; None starts
        afresh.
      notify: Told in one sentence what the user should know and no exception says.

    Attributes:
      run_dir: The folder, which may become another one, see `keep_folder`.
      displaced: On process 0 of several: the error that says so, until all are told.
      last_failed: Whether the newest save that was waited for could not be written.
    Raises:
      PeerError: Where there are several processes, for any of the following, and if one does not see the folder.
      CheckpointError: If another process runs in the folder, if it holds checkpoints that nobody asked to
        resume or to overwrite, or if `resume_from` exists but holds no whole checkpoint.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        keep: int,
        overwrite: bool = False,
        resume_from: str | os.PathLike[str] | None = None,
        notify: Callable[[str], None] = warnings.warn,
    ) -> None:
        if keep < 1:
            raise ValueError(f"`train.keep_checkpoints` must be at least 1, got {keep}.")
        self._keep, self._notify = keep, notify
        self._lock: IO[str] | None = None
        self._kept: Retention | None = None
        found = on_main(lambda: self._open(Path(run_dir).absolute(), resume_from, overwrite))
        self.run_dir = Path(found["run_dir"])
        self._source = None if found["source"] is None else Path(found["source"])
        try:  # before the others read or write anything here: is it one folder for all?
            gather(failure=see_sign(self.run_dir, found["sign"]))
        except BaseException:
            self._unlock()
            raise
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: tuple[int, Future[None]] | None = None
        self._abandoned = False
        self._was_lost = False  # the folder, since the save in flight began
        self.displaced: InUseError | None = None
        self.last_failed = False

    def _open(
        self, run_dir: Path, resume_from: str | os.PathLike[str] | None, overwrite: bool
    ) -> dict[str, str | None]:
        """Takes the folder: what the other processes must know of it."""
        target = None if resume_from is None else Path(resume_from).absolute()
        if target is not None and not may_resume(target, run_dir, self._notify):
            target = None
        self._lock = lock(run_dir)
        try:
            recover(run_dir, self._notify)
            source = None if target is None else find_checkpoint(target, self._notify)
            if not overwrite and (source is None or source.parent != run_dir):
                refuse_others(run_dir)
            self._kept = Retention(run_dir, self._keep)
            sign = leave_sign(self._lock)
        except BaseException:
            self._unlock()
            raise
        return {"run_dir": str(run_dir), "source": None if source is None else str(source), "sign": sign}

    def keep_folder(self, *, together: bool = True) -> None:
        """Sees to it that the run still has its folder; between iterations, for it costs process 0 one system call.

        A folder that was deleted or renamed is made anew and locked again, so is the lock alone, and that is said.
        Where another run has the folder by now, this one moves to a folder of its own beside it.

        Args:
          together: Whether all processes call this now. Of several, process 0 keeps the error in `displaced` until
            they do.
        Raises:
          InUseError: In that case, naming the new folder, which `run_dir` is from then on.
          PeerError: The same in all of several processes.
        """
        try:
            self._see_folder()
        except InUseError as error:
            self.displaced = error
        if together or jax.process_count() == 1:
            displaced, self.displaced = self.displaced, None
            self.run_dir = Path(from_main(str(self.run_dir)))
            gather(failure=displaced)

    def _see_folder(self) -> None:
        """Part of `keep_folder` that process 0 does."""
        if self._lock is None or is_at(self._lock.fileno(), self.run_dir / LOCK):
            return
        is_news, self._was_lost = not self._was_lost, True
        try:
            self._lock_again(self.run_dir)
        except InUseError as error:
            # Named after what it held: another run may have been moved aside before.
            sign = os.fstat(self._lock.fileno()).st_ino
            self._lock_again(self.run_dir.with_name(f"{self.run_dir.name}_displaced_{sign}"))
            raise InUseError(
                f"{error} The {LOCK} of this run was deleted meanwhile, so that the other could begin. This one ends; "
                f"what it has done since its last checkpoint, and all its records, are in {self.run_dir}."
            ) from error
        except CheckpointError as error:  # as a disk that refuses: it is tried again
            if is_news:
                self._notify(f"{self.run_dir} was deleted or renamed while the run worked there. {error}")
            return
        self._notify(
            f"{self.run_dir}, or the {LOCK} in it, was deleted or renamed while the run worked there. It is there "
            "again; checkpoints that went with it are where they were moved to, if anywhere."
        )

    def _lock_again(self, run_dir: Path) -> None:
        """Takes a folder instead of the one before."""
        taken = lock(run_dir)
        self._unlock()
        self._lock, self.run_dir = taken, run_dir
        leave_sign(taken)
        self._kept = Retention(run_dir, self._keep)

    def save(
        self,
        step: int,
        state: Any,
        *,
        write_model: Callable[[Path], None],
        config: Mapping[str, Any],
        cursor: Mapping[str, Any],
        best_score: float | None,
    ) -> None:
        """Copies the state to the host and starts writing; returns while the disk still works.

        A save that fails for want of space, or because the disk refuses, is told and leaves the older
        checkpoints as they were; the run goes on. One save is in flight at a time: this waits for the
        previous one.

        Args:
          step: Optimizer steps taken; names the checkpoint.
          state: Arrays on any devices; they may be donated as soon as this returns. None keeps the model only
            (`train.save_optimizer: false`): such a checkpoint cannot be resumed.
          write_model: Writes the model into the folder it is given, later and on another thread: what it
            writes must be on the host already.
          config: The resolved configuration.
          cursor: Where the run stands, plain JSON.
          best_score: The run's best evaluation so far; the first checkpoint that carries it counts as the
            best one.
        """
        self.wait()
        content = {
            CONFIG: yaml.safe_dump(without_secrets(plain(config)), sort_keys=False, allow_unicode=True),
            CURSOR: json.dumps(plain(cursor), indent=1),
        }
        entries = {"step": step, "best_score": best_score, "environment": environment_record()}
        draft = Draft(self.path(step))
        arrays = None if state is None else fetch_state(state)
        self._writer.submit(draft.start, arrays).result()
        work = partial(draft.finish, write_model=write_model, content=content, entries=entries)
        self._pending = step, self._writer.submit(self._write, step, best_score, work)

    def wait(self) -> None:
        """Waits for the save in flight and tells where it failed. All processes call it, and find the same.

        Raises:
          Exception: What `write_model` or Orbax raised, unless the disk was at fault.
        """
        if self._pending is None:
            return
        (step, future), self._pending = self._pending, None
        error = future.exception()
        # What fails in a folder that is deleted meanwhile is no mistake of the program.
        kind = None if error is None else DISK if self._was_lost else _kind(error)
        self._was_lost = False
        told = [word.plain for word in gather(None if error is None else [kind, str(error)])]
        failures = dict(entry for entry in reversed(told) if entry is not None)
        if not failures:
            self.last_failed = False
            return
        self.last_failed = True
        reasons = " ".join(dict.fromkeys(failures.values()))
        if OTHER in failures or DISK not in failures:
            raise error if error is not None and kind == OTHER else CheckpointError(reasons)
        if is_main():
            kept = [path.name for path in checkpoints_in(self.run_dir).values()]
            self._notify(
                f"Checkpoint {step} could not be written to {self.run_dir}: {reasons}. The run goes on; kept: "
                f"{', '.join(kept) or 'none'}. Is the disk full, or a quota reached?"
            )

    def abandon(self, *, seconds: float) -> None:
        """Gives the save in flight a little time, where the processes can no longer agree on how it ended."""
        if self._pending is not None:
            (_, future), self._pending = self._pending, None
            self._abandoned = True
            with contextlib.suppress(TimeoutError):
                future.exception(timeout=seconds)

    def restore(
        self, state: Any, *, config: Mapping[str, Any], frozen_sha256: Callable[[], str]
    ) -> Restored | None:
        """The checkpoint that `resume_from` named.

        Args:
          state: Arrays, or `jax.ShapeDtypeStruct`s with shardings: shapes, types and places of the result.
          config: The run's configuration, compared with the stored one.
          frozen_sha256: Gives the fingerprint of the frozen arrays, compared with the cursor's
            `frozen_sha256`; asked only when there is a checkpoint.
        Returns:
          None on a fresh run.
        Raises:
          CheckpointError: If the configuration, the frozen arrays or the shapes are not those of the
            checkpoint.
        """
        if self._source is None:
            return None
        path = self._source
        head = on_main(partial(self._read_head, path, config))
        cursor = head["cursor"]
        if cursor["frozen_sha256"] != frozen_sha256():
            raise CheckpointError(
                f"{path} was trained on other frozen parameters (their SHA-256 differs). Is "
                "`model.model_path` still the model that the run started from?"
            )
        if not head["resumable"]:
            raise CheckpointError(f"{path} holds a model but no state: `train.save_optimizer` was false.")
        if is_main():
            check_environment(head["environment"], self._notify)
        return Restored(read_state(path / STATE, state), cursor, path, head["step"])

    def _read_head(self, path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads a checkpoint's contents beside its arrays."""
        manifest = read_manifest(path)
        check_config(yaml.safe_load((path / CONFIG).read_text(encoding="utf-8")), config)
        return {
            "step": manifest["step"],
            "environment": manifest["environment"],
            "cursor": json.loads((path / CURSOR).read_text(encoding="utf-8")),
            "resumable": (path / STATE).exists(),
        }

    @property
    def best(self) -> Path | None:
        """The best checkpoint, None while no evaluation has counted. Process 0 knows."""
        step = None if self._kept is None else self._kept.best_step()
        return None if step is None else self.path(step)

    def close(self) -> None:
        """Waits for the save in flight, then lets another run have the folder. Calling it twice is harmless."""
        try:
            self.wait()
        finally:
            self._writer.shutdown(wait=not self._abandoned)
            self._unlock()

    def path(self, step: int) -> Path:
        """Folder of the checkpoint of a step."""
        return self.run_dir / f"checkpoint_{step}"

    def take_over(self) -> None:
        """Leaves in the folder only checkpoints that belong to the run that begins; called once all is checked."""
        on_main(self._take_over)

    def _take_over(self) -> None:
        """Part of `take_over` that process 0 does."""
        assert self._kept is not None, "process 0 has taken the folder"
        for step, path in checkpoints_in(self.run_dir).items():
            if self._source is None or self._source.parent != self.run_dir:
                shutil.rmtree(path)
                self._kept.forget(step)
            elif step > int(self._source.name.removeprefix("checkpoint_")):
                # Later ones belong to a future that will now be written anew, or are damaged: out of the way, but
                # not lost.
                aside = path.with_name(f"superseded_{step}")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
                self._kept.forget(step)
                self._notify(f"{path.name} is newer than {self._source.name}; it is kept as {aside.name}.")

    def _unlock(self) -> None:
        """Lets another run have the folder."""
        if self._lock is not None:
            self._lock.close()

    def _write(self, step: int, best_score: float | None, finish: Callable[[], None]) -> None:
        """Writes one checkpoint and drops what need not be kept. On the writer's thread."""
        finish()
        if self._kept is not None:
            self._kept.add(step, self.path(step), best_score)


def _kind(error: BaseException) -> str:
    """Culprit of a failed write: the disk, another process, or something else."""
    if isinstance(error, PartError):
        return DISK if isinstance(error, LateError) else PEER
    return DISK if disk_is_at_fault(error) else OTHER
