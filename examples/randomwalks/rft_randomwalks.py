# SPDX-License-Identifier: Apache-2.0
"""Shortest paths by rejection fine-tuning: a model of random walks learns from the best of its own, with trlX's recipe.

    python examples/randomwalks/rft_randomwalks.py --seed 0 1 2

First a 6-layer GPT-2 of 1.7 million parameters reads the 1000 walks of graph 1000 (SFT). Then, round by round, it walks
100 times from each of the 20 starts and is fine-tuned on those walks of a start that are among its best tenth, each
once. Every evaluation samples each start 50 times. The table sets the result beside the figures of trlX's newest commit
on the same graph and model.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from curves import GRAPH_SEED, SAMPLES_PER_START, Clock, Curve, curve_of, evaluation_seconds, report
from pretrain import pretrain
from randomwalks import make_randomwalks
from rich.console import Console

import jrl
from jrl.trainers.overrides import apply_overrides

RECIPES = Path(__file__).resolve().parents[2] / "configs"
TRLX = {
    0: "0.30 [0.27..0.32]",
    100: "0.82 [0.74..0.90]",
    200: "0.88 [0.80..0.95]",
    300: "[0.95..1.00]",
    1000: "[0.95..1.00]",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs SFT and RFT for each seed and prints optimality over steps."""
    top = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="Any other --a.b flag overrides the RFT recipe.",
    )
    top.add_argument("--seed", type=int, nargs="+", default=[0], help="training seeds, one run each")
    top.add_argument(
        "--output-dir", default=time.strftime("runs/randomwalks/%Y%m%d-%H%M%S"), help="run folder"
    )
    flags, overrides = top.parse_known_args(argv)
    console, folder, clock = Console(), Path(flags.output_dir), Clock()
    config = apply_overrides(jrl.TRLConfig.load_yaml(RECIPES / "rft_randomwalks.yaml"), overrides)
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
                    train={"seed": seed, "checkpoint_dir": str(folder / str(seed) / "rft")},
                    tokenizer={"tokenizer_path": str(start)},
                ),
            )
        if trainer.interrupted:
            return 0
        curves[seed] = curve_of(trainer.history)
        evaluating += evaluation_seconds(trainer.history)
    report(
        console,
        folder,
        curves,
        clock=clock,
        trlx=TRLX,
        trlx_title="trlX, newest commit, 2 seeds",
        evaluating=evaluating,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
