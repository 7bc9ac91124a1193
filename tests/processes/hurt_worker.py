# SPDX-License-Identifier: Apache-2.0
"""A tiny run that may be hurt on its way: `hurt_worker.py SPECIFICATION`.

The file holds what the worker's does, and `hurt`: null, or `process`, `moment` and `step` (where), and `signal` (how: a
number; null: another run takes the run's folder). Moments are "rollout" (step counts the calls of the reward function),
"update" (the metrics of that step are read, the next update is on its way) and "save" (that step's checkpoint is being
written).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jrl.placement import fetch
from jrl.trainers.checkpoints.resume import LOCK
from jrl.trainers.checkpoints.run_folder import lock
from jrl.trainers.loop.hooks import Hooks, watch
from tests.processes import worker
from tests.trainers import runs


class Hurt:
    """Sends this process a signal when its moment has come, or lets another run have its folder; once.

    Args:
      run_dir: Of the run.
      process: Which one is meant.
      moment: "rollout", "update" or "save".
      step: Optimizer steps.
      signal: Its number; None: the folder is taken.
    """

    def __init__(self, run_dir: Path, *, process: int, moment: str, step: int, signal: int | None) -> None:
        self._run_dir = run_dir
        self._process, self._moment, self._step, self._signal = process, moment, step, signal
        self._seen = 0

    def at(self, moment: str, step: int) -> None:
        """Tells that the run is there."""
        if (moment, step) == (self._moment, self._step) and jax.process_index() == self._process:
            self._moment = "over"
            print(f"hurt at {moment} {step}", flush=True)
            if self._signal is not None:
                os.kill(os.getpid(), self._signal)
            else:
                (self._run_dir / LOCK).unlink()
                self._other = lock(self._run_dir)  # the kernel knows open files, not processes

    def reward(self, outputs: list[str], prompts: list[str], **others: Any) -> list[float]:
        """The worker's reward function, called in the rollouts of an iteration and in evaluations."""
        self._seen += 1
        self.at("rollout", self._seen)
        return worker.vowels(outputs, prompts, **others)


def main(specification: dict[str, Any]) -> None:
    """Trains, and writes what came of it, if it lives."""
    folder = Path(specification["folder"])
    hurt = None if specification["hurt"] is None else Hurt(folder / "run", **specification["hurt"])
    if hurt is not None:
        worker.REWARDS["vowels"] = hurt.reward
    hooks = Hooks(
        log=lambda record: hurt and hurt.at("update", record["step"]),
        save=lambda path: hurt and hurt.at("save", int(path.name.removeprefix("checkpoint_"))),
    )
    make_config = {"ppo": runs.ppo_config, "sft": runs.sft_config}[specification["algorithm"]]
    config = make_config(specification["checkpoint"], folder / "run", **specification["sections"])
    with watch(hooks):
        trainer = worker.make_trainer(specification["algorithm"], config, "vowels")
    trainer.learn()
    process = jax.process_index()
    result = {"history": runs.repeatable(trainer.history), "generated": []}
    (folder / f"result_{process}.json").write_text(json.dumps(result), encoding="utf-8")
    leaves = jax.tree_util.tree_flatten_with_path(fetch(trainer.params))[0]
    np.savez(folder / f"params_{process}.npz", **{jax.tree_util.keystr(path): leaf for path, leaf in leaves})


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
