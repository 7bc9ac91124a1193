# SPDX-License-Identifier: Apache-2.0
"""Random walks by supervised fine-tuning: what a model of the walks reaches, and what cloning the best of them does.

    python examples/randomwalks/sft_randomwalks.py --seed 0
    python examples/randomwalks/sft_randomwalks.py --seed 0 --min-optimality 1

A 6-layer GPT-2 of 1.7 million parameters with random weights reads the 1000 walks of graph 1000, or those of them that
are good enough: 184 are shortest. On all of them it walks as well as they do, 0.35 in the mean; PPO and RFT start from
that. Every evaluation samples each of the 20 starts 50 times.
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

RECIPE = Path(__file__).resolve().parents[2] / "configs" / "sft_randomwalks.yaml"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs SFT for each seed and prints optimality over steps."""
    top = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="Any other --a.b flag overrides the recipe.",
    )
    top.add_argument("--seed", type=int, nargs="+", default=[0], help="training seeds, one run each")
    top.add_argument(
        "--min-optimality", type=float, default=0.0, help="walks below this are left out; default: 0, none"
    )
    top.add_argument(
        "--output-dir", default=time.strftime("runs/randomwalks/%Y%m%d-%H%M%S"), help="run folder"
    )
    flags, overrides = top.parse_known_args(argv)
    console, folder, clock = Console(), Path(flags.output_dir), Clock()
    config = jrl.apply_overrides(jrl.TRLConfig.load_yaml(RECIPE), overrides)
    task = make_randomwalks(seed=GRAPH_SEED)
    walks = [walk for walk in task.walks if task.optimality(walk) >= flags.min_optimality]
    tokenizer = letter_tokenizer(task.letters)
    tokenizer.save_pretrained(folder / "tokenizer")

    curves: dict[int, Curve] = {}
    evaluating = 0.0
    for seed in flags.seed:
        console.rule(f"seed {seed}, {len(walks)} walks")
        with clock:
            trainer = jrl.train(
                model_path=architecture_for(tokenizer),
                samples=walks,
                eval_prompts=task.eval_prompts * SAMPLES_PER_START,
                metric_fn=task.metric_fn,
                config=config.evolve(
                    train={"seed": seed, "checkpoint_dir": str(folder / str(seed) / "sft")},
                    tokenizer={"tokenizer_path": str(folder / "tokenizer")},
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
        trlx={},
        trlx_title="trlX",
        evaluating=evaluating,
        num_walks=len(walks),
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
