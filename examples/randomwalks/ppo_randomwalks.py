# SPDX-License-Identifier: Apache-2.0
"""Shortest paths by PPO: a language model of random walks learns to reach the goal, with trlX's recipe.

    python examples/randomwalks/ppo_randomwalks.py --seed 0 1 2

First a 6-layer GPT-2 of 1.7 million parameters reads the 1000 walks of graph 1000 (SFT), then PPO rewards
optimality: 1 for a shortest path, 0 for a wrong or unfinished one. Every evaluation samples each of the 20
starts 50 times. The table sets the result beside the figures of trlX v0.7.0 on the same graph and model.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pretrain import pretrain
from randomwalks import make_randomwalks
from rich.console import Console
from rich.table import Table

import jrl
from jrl.trainers.overrides import apply_overrides

RECIPES = Path(__file__).resolve().parents[2] / "configs"
GRAPH_SEED = 1000
SAMPLES_PER_START = 50
TRLX = {
    0: "0.36 [0.31..0.46]",
    20: "0.83 [0.74..0.92]",
    60: "0.92 [0.88..0.99]",
    100: "0.92 [0.90..0.95]",
    160: "0.93 [0.85..1.00]",
}
TRLX_BEST = "0.98 [0.95..1.00]"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs SFT and PPO for each seed and prints optimality over steps."""
    top = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="Any other --a.b flag overrides the PPO recipe.",
    )
    top.add_argument("--seed", type=int, nargs="+", default=[0], help="training seeds, one run each")
    top.add_argument(
        "--output-dir", default=time.strftime("runs/randomwalks/%Y%m%d-%H%M%S"), help="run folder"
    )
    flags, overrides = top.parse_known_args(argv)
    began, console, folder = time.perf_counter(), Console(), Path(flags.output_dir)
    config = apply_overrides(jrl.TRLConfig.load_yaml(RECIPES / "ppo_randomwalks.yaml"), overrides)
    task = make_randomwalks(seed=GRAPH_SEED)

    curves: list[dict[int, float]] = []
    for seed in flags.seed:
        console.rule(f"seed {seed}")
        sft_config = jrl.TRLConfig.load_yaml(RECIPES / "sft_randomwalks.yaml")
        start = pretrain(task.walks, task.letters, folder / str(seed), config=sft_config, seed=seed)
        trainer = jrl.train(
            model_path=str(start),
            reward_fn=task.reward_fn,
            prompts=task.eval_prompts,
            eval_prompts=task.eval_prompts * SAMPLES_PER_START,
            metric_fn=task.metric_fn,
            config=config.evolve(
                train={"seed": seed, "checkpoint_dir": str(folder / str(seed) / "ppo")},
                tokenizer={"tokenizer_path": str(start)},
            ),
        )
        if trainer.interrupted:
            return 0
        evaluations = [record for record in trainer.history if "evaluation" in record]
        curves.append({record["step"]: record["metrics/optimality"] for record in evaluations})
    report(console, folder, curves, flags.seed, seconds=time.perf_counter() - began)
    return 0


def report(
    console: Console, folder: Path, curves: list[dict[int, float]], seeds: list[int], *, seconds: float
) -> None:
    """Prints optimality over steps beside trlX's, and writes it with the time to `summary.json`.

    An update is atomic, so an evaluation stands at the end of the iteration in which trlX's step falls.
    """
    table = Table(title="Random walks: mean optimality [min..max over seeds]")
    for column in ("step", f"jrl, {len(seeds)} seed(s)", "step", "trlX v0.7.0, 5 seeds"):
        table.add_column(column, justify="right")
    steps = sorted(curves[0])
    for trlx_step, figures in TRLX.items():
        step = min((s for s in steps if s >= trlx_step), default=steps[-1])
        table.add_row(str(step), _spread([curve[step] for curve in curves]), str(trlx_step), figures)
    table.add_row("best", _spread([max(curve.values()) for curve in curves]), "best", TRLX_BEST)
    console.print(table)
    summary = {
        "optimality": {str(seed): curve for seed, curve in zip(seeds, curves, strict=True)},
        "seconds": round(seconds, 1),
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    console.print(
        f"optimality {_spread([curve[0] for curve in curves])} -> {_spread([curve[steps[-1]] for curve in curves])}"
        f", best {_spread([max(curve.values()) for curve in curves])}, {seconds:.0f} s",
        soft_wrap=True,
        highlight=False,
    )


def _spread(values: Sequence[float]) -> str:
    return f"{np.mean(values):.2f} [{min(values):.2f}..{max(values):.2f}]"


if __name__ == "__main__":
    raise SystemExit(main())
