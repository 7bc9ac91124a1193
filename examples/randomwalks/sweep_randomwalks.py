# SPDX-License-Identifier: Apache-2.0
"""What `jrl sweep` runs, once a trial: PPO on the random walks, from one pre-trained model that all trials share.

    jrl sweep examples/randomwalks/sweep_randomwalks.py --config configs/sweeps/ppo_randomwalks.yaml

The first trial pre-trains the model into `runs/randomwalks/start`; the others wait for it, and later sweeps find it.
"""

from __future__ import annotations

import fcntl
import json
import sys
from pathlib import Path
from typing import Any

from pretrain import pretrain
from randomwalks import RandomWalks, make_randomwalks

import jrl

RECIPES = Path(__file__).resolve().parents[2] / "configs"
START = Path("runs/randomwalks/start")
GRAPH_SEED = 1000
SAMPLES_PER_START = 10


def main(hparams: dict[str, Any]) -> None:
    """Runs PPO with the recipe and these changes of it, dotted name → value."""
    task = make_randomwalks(seed=GRAPH_SEED)
    start = str(starting_model(task))
    recipe = jrl.TRLConfig.load_yaml(RECIPES / "ppo_randomwalks.yaml")
    recipe = recipe.evolve(train={"seed": 0, "save_best": False})
    jrl.train(
        model_path=start,
        reward_fn=task.reward_fn,
        prompts=task.eval_prompts,
        eval_prompts=task.eval_prompts * SAMPLES_PER_START,
        metric_fn=task.metric_fn,
        config=jrl.TRLConfig.update(recipe, hparams),
    )


def starting_model(task: RandomWalks) -> Path:
    """Folder of the pre-trained model; whoever comes first makes it."""
    START.mkdir(parents=True, exist_ok=True)
    made, ready = START / "sft_model", START / "ready"
    with (START / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released with the file, however this process ends
        if not ready.exists():
            recipe = jrl.TRLConfig.load_yaml(RECIPES / "sft_randomwalks.yaml").evolve(
                train={"overwrite": True}
            )
            pretrain(task.walks, task.letters, START, config=recipe, seed=0)
            ready.touch()
    return made


if __name__ == "__main__":
    main(json.loads(sys.argv[1]) if len(sys.argv) > 1 else {})
