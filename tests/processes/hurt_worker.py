# SPDX-License-Identifier: Apache-2.0
"""A tiny run that may be hurt on its way: `hurt_worker.py SPECIFICATION`.

The file holds what the worker's does, and `hurt`: null, or `process`, `moment` and `step` (where), and `signal` (how, a
number). Moments are "rollout" (step counts the calls of the reward function), "update" (the metrics of that step are
read, the next update is on its way) and "save" (that step's checkpoint is being written).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jrl.trainers.hooks import Hooks, watch
from jrl.trainers.placing import fetch
from tests.processes import worker
from tests.trainers import runs


class Hurt:
    """Sends this process a signal when its moment has come; once.

    Args:
      process: Which one is meant.
      moment: "rollout", "update" or "save".
      step: Optimizer steps.
      signal: Its number.
    """

    def __init__(self, process: int, moment: str, step: int, signal: int) -> None:
        self._process, self._moment, self._step, self._signal = process, moment, step, signal
        self._seen = 0

    def at(self, moment: str, step: int) -> None:
        """Tells that the run is there."""
        if (moment, step) == (self._moment, self._step) and jax.process_index() == self._process:
            self._moment = "over"
            print(f"hurt at {moment} {step}", flush=True)
            os.kill(os.getpid(), self._signal)

    def reward(self, outputs: list[str], prompts: list[str], **others: Any) -> list[float]:
        """The worker's reward function, called in the rollouts of an iteration and in evaluations."""
        self._seen += 1
        self.at("rollout", self._seen)
        return worker.vowels(outputs, prompts, **others)


def main(specification: dict[str, Any]) -> None:
    """Trains, and writes what came of it, if it lives."""
    hurt = None if specification["hurt"] is None else Hurt(**specification["hurt"])
    if hurt is not None:
        worker.REWARDS["vowels"] = hurt.reward
    hooks = Hooks(
        log=lambda record: hurt and hurt.at("update", record["step"]),
        save=lambda path: hurt and hurt.at("save", int(path.name.removeprefix("checkpoint_"))),
    )
    make_config = {"ppo": runs.ppo_config, "sft": runs.sft_config}[specification["algorithm"]]
    folder = Path(specification["folder"])
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
