# SPDX-License-Identifier: Apache-2.0
"""The faults that a job does to itself: a function that fails, a disk that fills up, a gradient that is NaN."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jrl.trainers.base import Trainer
from jrl.trainers.checkpoints.manifest import tree_sha256

BLOCK = bytes(4096)


def failing(
    healthy: Callable[..., Any], *, fault: str, call: int, until: int | None = None
) -> Callable[..., Any]:
    """A reward or metric function whose fault shows in some of its calls.

    Args:
      healthy: What it does in the others.
      fault: "raises", "exits", "hangs", "garbage" or "count".
      call: Number of the first call that it shows in.
      until: Number of the first call after it; None: it stays.
    """
    calls = 0

    def function(outputs: Any, *others: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls < call or (until is not None and calls >= until):
            return healthy(outputs, *others, **keywords)
        if fault == "hangs":
            time.sleep(3600)
        if fault == "exits":
            sys.exit(0)
        if fault == "raises":
            raise ConnectionError("the judge does not answer")
        return ["garbage"] * len(outputs) if fault == "garbage" else healthy(outputs[1:], **keywords)

    return function


def forking(healthy: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose first call leaves a child behind that outlives the run."""
    children: list[int] = []

    def function(*others: Any, **keywords: Any) -> Any:
        if not children:
            children.append(os.fork())
            if not children[0]:
                time.sleep(3600)
                os._exit(0)
        return healthy(*others, **keywords)

    return function


class Disk:
    """Fills the disk that a run writes to, and may make room again.

    Args:
      full: Folder of the run's disk.
      fill_at: Step from which on not one block is left.
      free_at: Step from which on there is room again; None: never.
      copy_to: Where the run's folder is to be copied in the end: the disk goes with its process.
    """

    def __init__(self, *, full: str, fill_at: int, free_at: int | None, copy_to: str) -> None:
        self._filler, self._copy_to = Path(full) / "filler", Path(copy_to)
        self._fill_at, self._free_at = fill_at, free_at

    def heard(self, step: int) -> None:
        """A step was logged."""
        if self._free_at is not None and step >= self._free_at:
            self._filler.unlink(missing_ok=True)
        elif step >= self._fill_at:  # again and again: what a failed save gives back is taken too
            with self._filler.open("ab", buffering=0) as file:
                try:
                    while True:
                        file.write(BLOCK)
                except OSError as error:
                    assert error.errno == errno.ENOSPC
            print(
                f"full at step {step}: {shutil.disk_usage(self._filler.parent).free} bytes free", flush=True
            )

    def copy(self, folder: Path) -> None:
        """The run has ended."""
        shutil.copytree(folder, self._copy_to, ignore=lambda *_: ["wandb"])


@contextlib.contextmanager
def poisoned(places: dict[str, list[int]]) -> Iterator[None]:
    """Some updates see NaN in one row of their batch, and say what became of the weights.

    Args:
      places: Field of the batch → numbers of the updates whose first row is poisoned there.
    """
    if not places:
        yield
        return
    compile_learner, count = Trainer.compile_learner, 0

    def compile_and_poison(trainer: Trainer, *arguments: Any) -> None:
        compile_learner(trainer, *arguments)
        update = trainer.update

        def poisoning(state: Any, frozen: Any, batch: Any, *others: Any) -> Any:
            nonlocal count
            count += 1
            for field, updates in places.items():
                if count in updates:
                    healthy = getattr(batch, field)
                    batch = batch._replace(**{field: jnp.asarray(healthy).at[0].set(jnp.nan)})
            before = weights_of(state)
            state, metrics = update(state, frozen, batch, *others)
            print(f"update {count}: weights {'kept' if weights_of(state) == before else 'moved'}", flush=True)
            return state, metrics

        trainer.update = poisoning

    Trainer.compile_learner = compile_and_poison
    try:
        yield
    finally:
        Trainer.compile_learner = compile_learner


def weights_of(state: Any) -> str:
    """Fingerprint of all that trains, and of the moments: of everything but the counters of steps."""
    train = getattr(state, "train", state)
    return tree_sha256((train.params, train.opt_state.inner_state))
