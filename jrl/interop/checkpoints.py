# SPDX-License-Identifier: Apache-2.0
"""Checkpoints outside of a run: written and read whenever a script asks, in the layout of every run."""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path

import jax

from jrl.trainers.base import Trainer
from jrl.trainers.checkpoints.checkpointer import Checkpointer
from jrl.trainers.checkpoints.cursor import make_cursor
from jrl.trainers.checkpoints.resume import checkpoints_in


def write_checkpoint(
    trainer: Trainer, directory: str | os.PathLike[str], *, steps_per_iteration: int, evaluations: int
) -> Path:
    """Writes `checkpoint_<step>` into a folder, beside those that are there.

    Args:
      trainer: With its data.
      directory: Made where it does not exist; no run may be at work in it.
      steps_per_iteration: Optimizer steps of an iteration.
      evaluations: Evaluations so far.
    Returns:
      The checkpoint.
    """
    folder = Path(directory)
    step = int(jax.device_get(trainer.optimizer_steps()))
    others = folder if folder.is_dir() and checkpoints_in(folder) else None
    writer = Checkpointer(folder, keep=trainer.config.train.keep_checkpoints, resume_from=others)
    try:
        writer.take_over()
        writer.save(
            step,
            trainer.kept_arrays,
            write_model=trainer.export_writer(),
            config=trainer.config.to_dict(),
            cursor=make_cursor(
                trainer,
                iteration=math.ceil(step / steps_per_iteration),
                evaluations=evaluations,
                evaluation_due=False,
                best_score=None,
                data_sha256=trainer.data_sha256(),
            ),
            best_score=None,
        )
    finally:
        writer.close()
    return writer.path(step)


def read_checkpoint(trainer: Trainer, directory: str | os.PathLike[str]) -> None:
    """Puts a checkpoint's state into the trainer, which resumes from it when it learns.

    Args:
      trainer: Of the same model and configuration.
      directory: A checkpoint, or a folder of which the newest is taken.
    Raises:
      ValueError: If the folder does not exist.
      CheckpointError: If it holds no whole checkpoint, or one of another model or configuration.
    """
    source = Path(directory)
    if not source.exists():
        raise ValueError(f"`directory` must hold a checkpoint, and {source} does not exist.")
    with tempfile.TemporaryDirectory() as elsewhere:  # reading must not take the lock of a run
        reader = Checkpointer(elsewhere, keep=1, resume_from=source)
        try:
            found = reader.restore(
                trainer.kept_arrays, config=trainer.config.to_dict(), frozen_sha256=trainer.frozen_sha256
            )
        finally:
            reader.close()
    assert found is not None, "the folder exists"
    trainer.restore(found.state, found.cursor["host_state"])
    trainer.config.train.resume_from_checkpoint = str(source)
