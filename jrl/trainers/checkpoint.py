# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are either whole or not there: written aside, fingerprinted, renamed once.

Orbax stores the arrays. What it leaves to its caller is done here: it restores flipped bits without a word,
refuses to save below its newest step by returning False, and keeping its newest two by score can delete the
newest one. `docs/checkpoints.md` has the layout and the rules.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from jrl.trainers.manifest import CheckpointError, read_manifest, sync_directory, write_manifest
from jrl.trainers.manifest import tree_sha256 as tree_sha256
from jrl.trainers.resume import (
    check_config,
    check_environment,
    checkpoints_in,
    environment_record,
    find_checkpoint,
    may_resume,
    plain,
)
from jrl.trainers.run_folder import lock, recover
from jrl.trainers.state_io import disk_is_at_fault, fetch_state, read_state, write_state

STATE, MODEL, CONFIG, CURSOR = "state", "hf_model", "config.yaml", "cursor.json"


@dataclass(frozen=True)
class Restored:
    """What a checkpoint gave back.

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
    Raises:
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
        self.run_dir, self._keep, self._notify = Path(run_dir).absolute(), keep, notify
        target = None if resume_from is None else Path(resume_from).absolute()
        if target is not None and not may_resume(target, self.run_dir, notify):
            target = None
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._lock = lock(self.run_dir)
        try:
            recover(self.run_dir, notify)
            self._source = None if target is None else find_checkpoint(target, notify)
            self._refuse_others(overwrite)
        except BaseException:
            self._lock.close()
            raise
        self._scores = {step: _score(path) for step, path in checkpoints_in(self.run_dir).items()}
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: tuple[int, Future[None]] | None = None
        self.failed_saves = 0

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
            CONFIG: yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True),
            CURSOR: json.dumps(plain(cursor), indent=1),
        }
        entries = {"step": step, "best_score": best_score, "environment": environment_record()}
        arrays = None if state is None else fetch_state(state)
        self._pending = step, self._writer.submit(self._write, step, arrays, write_model, content, entries)

    def wait(self) -> None:
        """Waits for the save in flight and tells where it failed.

        Raises:
          Exception: What `write_model` or Orbax raised, unless the disk was at fault.
        """
        if self._pending is None:
            return
        (step, future), self._pending = self._pending, None
        error = future.exception()
        if error is None:
            return
        self.failed_saves += 1
        if not disk_is_at_fault(error):
            raise error
        kept = [path.name for path in checkpoints_in(self.run_dir).values()]
        self._notify(
            f"Checkpoint {step} could not be written to {self.run_dir}: {error}. The run goes on; kept: "
            f"{', '.join(kept) or 'none'}. Is the disk full, or a quota reached?"
        )

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
        manifest = read_manifest(path)
        check_config(yaml.safe_load((path / CONFIG).read_text(encoding="utf-8")), config)
        cursor = json.loads((path / CURSOR).read_text(encoding="utf-8"))
        if cursor["frozen_sha256"] != frozen_sha256():
            raise CheckpointError(
                f"{path} was trained on other frozen parameters (their SHA-256 differs). Is "
                "`model.model_path` still the model that the run started from?"
            )
        if not (path / STATE).exists():
            raise CheckpointError(f"{path} holds a model but no state: `train.save_optimizer` was false.")
        check_environment(manifest["environment"], self._notify)
        return Restored(read_state(path / STATE, state), cursor, path, manifest["step"])

    @property
    def best(self) -> Path | None:
        """The best checkpoint, None while no evaluation has counted."""
        step = self._best_step()
        return None if step is None else self.path(step)

    def close(self) -> None:
        """Waits for the save in flight, then lets another run have the folder. Calling it twice is harmless."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()
            self._lock.close()

    def path(self, step: int) -> Path:
        """Folder of the checkpoint of a step."""
        return self.run_dir / f"checkpoint_{step}"

    def _is_at_home(self) -> bool:
        """Whether the run that begins continues one of this folder."""
        return self._source is not None and self._source.parent == self.run_dir

    def _refuse_others(self, overwrite: bool) -> None:
        present = checkpoints_in(self.run_dir)
        if present and not overwrite and not self._is_at_home():
            names = ", ".join(path.name for path in present.values())
            raise CheckpointError(
                f"{self.run_dir} holds checkpoints of an earlier run ({names}). Set "
                "`train.resume_from_checkpoint` to continue it, `train.overwrite: true` to delete them, or "
                "`train.checkpoint_dir` to another folder."
            )

    def take_over(self) -> None:
        """Leaves in the folder only checkpoints that belong to the run that begins.

        Called once all is checked: a run that is refused must not have touched those of another.
        """
        present = checkpoints_in(self.run_dir)
        if self._source is None or not self._is_at_home():
            for path in present.values():
                shutil.rmtree(path)
            self._scores = {}
            return
        # Later ones belong to a future that will now be written anew, or are damaged: out of the way, but not
        # lost.
        for step, path in present.items():
            if step > int(self._source.name.removeprefix("checkpoint_")):
                aside = path.with_name(f"superseded_{step}")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
                self._scores.pop(step, None)
                self._notify(f"{path.name} is newer than {self._source.name}; it is kept as {aside.name}.")

    def _write(
        self,
        step: int,
        arrays: Mapping[str, Any] | None,
        write_model: Callable[[Path], None],
        content: Mapping[str, str],
        entries: Mapping[str, Any],
    ) -> None:
        """Writes one checkpoint aside, publishes it and drops what need not be kept. On the writer's thread."""
        aside = self.path(step).with_suffix(".tmp")
        shutil.rmtree(aside, ignore_errors=True)
        try:
            aside.mkdir()
            if arrays is not None:
                write_state(aside / STATE, arrays)
            write_model(aside / MODEL)
            for name, text in content.items():
                (aside / name).write_text(text, encoding="utf-8")
            write_manifest(aside, entries)
            self._publish(aside, self.path(step))
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        self._scores[step] = entries["best_score"]
        for old in self._superfluous():
            doomed = self.path(old).with_suffix(
                ".tmp"
            )  # half-deleted must not look like a damaged checkpoint
            self.path(old).rename(doomed)
            shutil.rmtree(doomed)
            del self._scores[old]

    def _publish(self, aside: Path, target: Path) -> None:
        """The one rename that makes a checkpoint exist; saving a step again replaces it."""
        replaced = target.with_suffix(".replaced")
        if target.exists():
            target.rename(replaced)
        aside.rename(target)
        sync_directory(target.parent)
        shutil.rmtree(replaced, ignore_errors=True)

    def _best_step(self) -> int | None:
        """First step that carries the highest score."""
        scored = [(score, -step) for step, score in self._scores.items() if score is not None]
        return -max(scored)[1] if scored else None

    def _superfluous(self) -> list[int]:
        newest = sorted(self._scores)[-self._keep :]
        return [step for step in self._scores if step not in newest and step != self._best_step()]


def _score(path: Path) -> float | None:
    """The score a checkpoint carries; a damaged one carries none."""
    try:
        score: float | None = read_manifest(path)["best_score"]
    except CheckpointError:
        return None
    return score
