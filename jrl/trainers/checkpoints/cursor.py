# SPDX-License-Identifier: Apache-2.0
"""Position of a run, which a checkpoint holds beside the state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jrl.trainers.checkpoints.manifest import CheckpointError

if TYPE_CHECKING:
    from jrl.trainers.base import Trainer


def make_cursor(
    trainer: Trainer,
    *,
    iteration: int,
    evaluations: int,
    evaluation_due: bool,
    best_score: float | None,
    data_sha256: Mapping[str, str],
) -> dict[str, Any]:
    """Builds a checkpoint's cursor, the position of the run beside the state: plain JSON.

    Args:
      trainer: Whose run it is.
      iteration: Iterations so far.
      evaluations: Evaluations so far.
      evaluation_due: Whether one was due after the last iteration, and failed.
      best_score: The best of them; None: none counted.
      data_sha256: Fingerprints of the data, as `Trainer.data_sha256` gives them.
    """
    return {
        "iteration": iteration,
        "records": len(trainer.history),
        "evaluations": evaluations,
        "evaluation_due": evaluation_due,
        "best_score": best_score,
        "frozen_sha256": trainer.frozen_sha256(),
        "data_sha256": dict(data_sha256),
        "host_state": trainer.host_state(),
    }


def check_data(saved: Mapping[str, str], current: Mapping[str, str], path: Path) -> None:
    """Refuses to go on from a checkpoint with other data than it was trained with.

    Args:
      saved: Fingerprints of the checkpoint's cursor.
      current: Those of the run.
      path: The checkpoint.
    Raises:
      CheckpointError: Naming what differs.
    """
    changed = [name for name in current if saved.get(name) != current[name]]
    if changed:
        raise CheckpointError(
            f"{path} was trained with others: {', '.join(f'`{name}`' for name in sorted(changed))} "
            "(of data its content or order, of a model its architecture or adapter). Give the same, or start a new "
            "run in another `train.checkpoint_dir`."
        )
