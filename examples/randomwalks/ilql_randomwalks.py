# SPDX-License-Identifier: Apache-2.0
"""Shortest paths from walks that were there before: ILQL with trlX's recipe, and nothing sampled in training.

    python examples/randomwalks/ilql_randomwalks.py --seed 0 1 2 3 4

A 6-layer GPT-2 with random weights reads the 1000 walks of graph 1000, each with its optimality as the reward. At
beta 0 it then walks as the data do; with beta the value of an action counts beside its likelihood, and the paths become
short. Every evaluation samples each of the 20 starts 50 times at every beta. The table sets the result at beta 100
beside the figures of trlX v0.7.0 on the same graph, data and model size.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from curves import GRAPH_SEED, SAMPLES_PER_START, Clock, Curve, curve_of, evaluation_seconds, report
from pretrain import architecture_for, letter_tokenizer
from randomwalks import make_randomwalks
from rich.console import Console

import jrl

RECIPE = Path(__file__).resolve().parents[2] / "configs" / "ilql_randomwalks.yaml"
TRLX = {
    48: "0.35 [0.10..0.51]",
    80: "0.79 [0.69..0.85]",
    112: "0.92 [0.83..1.00]",
    160: "0.99 [0.98..1.00]",
    200: "0.98 [0.95..0.99]",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ILQL for each seed and prints optimality over steps."""
    top = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="Any other --a.b flag overrides the recipe.",
    )
    top.add_argument("--seed", type=int, nargs="+", default=[0], help="training seeds, one run each")
    top.add_argument(
        "--output-dir", default=time.strftime("runs/randomwalks/%Y%m%d-%H%M%S"), help="run folder"
    )
    flags, overrides = top.parse_known_args(argv)
    console, folder, clock = Console(), Path(flags.output_dir), Clock()
    config = jrl.apply_overrides(jrl.TRLConfig.load_yaml(RECIPE), overrides)
    task = make_randomwalks(seed=GRAPH_SEED)
    tokenizer = letter_tokenizer(task.letters)
    tokenizer.save_pretrained(folder / "tokenizer")

    by_beta: dict[str, dict[int, Curve]] = {}
    evaluating = 0.0
    for seed in flags.seed:
        console.rule(f"seed {seed}")
        with clock:
            trainer = jrl.train(
                model_path=architecture_for(tokenizer),
                samples=[[walk[0], walk[1:]] for walk in task.walks],
                rewards=task.metric_fn(task.walks)["optimality"],
                eval_prompts=task.eval_prompts * SAMPLES_PER_START,
                metric_fn=task.metric_fn,
                config=config.evolve(
                    train={"seed": seed, "checkpoint_dir": str(folder / str(seed))},
                    tokenizer={"tokenizer_path": str(folder / "tokenizer")},
                ),
            )
        if trainer.interrupted:
            return 0
        betas = [trainer.settings.beta] if trainer.sweep is None else trainer.sweep[1]
        for beta in betas:
            suffix = "" if trainer.sweep is None else f"@beta={beta}"
            curve = curve_of(trainer.history, metric=f"metrics/optimality{suffix}")
            by_beta.setdefault(f"{beta:g}", {})[seed] = curve
        evaluating += evaluation_seconds(trainer.history)
    strongest = max(by_beta, key=float)
    report(
        console,
        folder,
        by_beta[strongest],
        clock=clock,
        trlx=TRLX,
        trlx_title="trlX v0.7.0, beta 100, 5 seeds",
        evaluating=evaluating,
        beta=float(strongest),
        optimality_by_beta=by_beta,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
