# SPDX-License-Identifier: Apache-2.0
"""What the online scripts of this folder have in common: pre-training on the walks, then a run against optimality."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from curves import GRAPH_SEED, SAMPLES_PER_START, Clock, Curve, curve_of, evaluation_seconds, report
from pretrain import pretrain
from randomwalks import make_randomwalks
from rich.console import Console

import jrl

RECIPES = Path(__file__).resolve().parents[2] / "configs"


def run_online(
    argv: Sequence[str] | None, algorithm: str, *, doc: str | None, trlx: Mapping[int, str], trlx_title: str
) -> int:
    """Runs SFT and the algorithm for each seed and prints optimality over steps.

    Args:
      argv: Of the script.
      algorithm: "ppo", "grpo" or "rft": its recipe is `<algorithm>_randomwalks.yaml`, its runs lie in folders of that
        name.
      doc: Of the script; its first line describes it.
      trlx: What trlX reaches, by step.
      trlx_title: Says which trlX that is.
    """
    top = argparse.ArgumentParser(
        description=(doc or "").partition("\n")[0],
        epilog=f"Any other --a.b flag overrides the {algorithm.upper()} recipe.",
    )
    top.add_argument("--seed", type=int, nargs="+", default=[0], help="training seeds, one run each")
    top.add_argument(
        "--output-dir", default=time.strftime("runs/randomwalks/%Y%m%d-%H%M%S"), help="run folder"
    )
    flags, overrides = top.parse_known_args(argv)
    console, folder, clock = Console(), Path(flags.output_dir), Clock()
    config = jrl.apply_overrides(
        jrl.TRLConfig.load_yaml(RECIPES / f"{algorithm}_randomwalks.yaml"), overrides
    )
    task = make_randomwalks(seed=GRAPH_SEED)

    curves: dict[int, Curve] = {}
    evaluating = 0.0
    for seed in flags.seed:
        console.rule(f"seed {seed}")
        sft_config = jrl.TRLConfig.load_yaml(RECIPES / "sft_randomwalks.yaml")
        start = pretrain(task.walks, task.letters, folder / str(seed), config=sft_config, seed=seed)
        with clock:
            trainer = jrl.train(
                model_path=str(start),
                reward_fn=task.reward_fn,
                prompts=task.eval_prompts,
                eval_prompts=task.eval_prompts * SAMPLES_PER_START,
                metric_fn=task.metric_fn,
                config=config.evolve(
                    train={"seed": seed, "checkpoint_dir": str(folder / str(seed) / algorithm)},
                ),
            )
        if trainer.interrupted:
            return 0
        curves[seed] = curve_of(trainer.history)
        evaluating += evaluation_seconds(trainer.history)
    report(console, folder, curves, clock=clock, trlx=trlx, trlx_title=trlx_title, evaluating=evaluating)
    return 0
