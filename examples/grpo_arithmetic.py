# SPDX-License-Identifier: Apache-2.0
"""Teaches a language model to calculate from nothing but right and wrong: SFT on worked answers with mistakes in
them, then GRPO against the verifier of reasoning-gym.

    python examples/grpo_arithmetic.py

downloads nothing: the problems are drawn by reasoning-gym, the tokenizer is trained on them, and a small GPT-2 learns
to answer as carelessly as the answers it reads. GRPO then compares eight answers to each problem. `--task` takes
chain_sum, number_sorting or countdown, `--algorithm` any other policy gradient of docs/grpo.md. A real checkpoint is
asked in the words of reasoning-gym:

    python examples/grpo_arithmetic.py --model Qwen/Qwen3-0.6B --in-words --task countdown \\
        --train.seq_length 640 --method.gen_kwargs.max_new_tokens 512

Every field of the GRPO recipe is a flag (`--method.num_generations 16`), and so is every field of the SFT recipe
(`--sft.train.total_steps 400`).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from arithmetic.pretrain import pretrain
from arithmetic.report import report
from arithmetic.tasks import MARK, TASKS
from rich.console import Console
from stages import RECIPES, add_flags, split_overrides, stopped

import jrl
from jrl.learners import ALGORITHMS, switches

SAMPLES = 4
"""Answers to each held-out problem."""
HELD_OUT_SEED = 1_000_000


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example; what it leaves is in `--output-dir`."""
    argv = sys.argv[1:] if argv is None else list(argv)
    flags, overrides, sft_overrides = parse(argv)
    began, console, folder = time.perf_counter(), Console(), Path(flags.output_dir)
    task = TASKS[flags.task]
    config = jrl.TRLConfig.load_yaml(flags.config)
    config = config.evolve(method={"gen_kwargs": {"max_new_tokens": task.max_new_tokens}})
    if flags.algorithm:
        config = config.draft(method=switches(flags.algorithm))
    config = jrl.apply_overrides(config, overrides)
    held_out = task.problems(flags.num_held_out, seed=HELD_OUT_SEED)
    known = [row["prompt"] for row in held_out]
    problems = task.problems(flags.num_problems, seed=HELD_OUT_SEED * (flags.seed + 2), without=known)

    start = flags.model
    if start is None:
        console.rule("Supervised fine-tuning")
        sft_config = jrl.apply_overrides(jrl.TRLConfig.load_yaml(flags.sft_config), sft_overrides)
        start = pretrain(task, problems, held_out, folder, config=sft_config, seed=flags.seed)
        if start is None:
            return stopped(console, argv, folder, "--sft.train.resume_from_checkpoint", folder / "sft")
    if flags.in_words:
        problems, held_out = in_words(problems), in_words(held_out)

    console.rule(flags.algorithm or "GRPO")
    trainer = jrl.train(
        model_path=str(start),
        reward_fn=task.verifier(),
        prompts=problems,
        eval_prompts=held_out * SAMPLES,
        config=config.evolve(train={"seed": flags.seed, "checkpoint_dir": str(folder / "grpo")}),
    )
    if trainer.interrupted:
        resume = ("--model", start, "--train.resume_from_checkpoint", folder / "grpo")
        return stopped(console, argv, folder, *resume)
    trainer.save_pretrained(folder / "policy")
    report(console, folder, trainer.history, k=SAMPLES, seconds=time.perf_counter() - began)
    return 0


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str], list[str]]:
    """The flags, the overrides of the GRPO recipe, and those of the SFT recipe (`--sft.` in front)."""
    top = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_flags(top, run="grpo_arithmetic")
    top.add_argument("--task", choices=list(TASKS), default="chain_sum", help="of reasoning-gym")
    top.add_argument(
        "--algorithm", choices=list(ALGORITHMS), help="an algorithm in the place of the recipe's"
    )
    top.add_argument(
        "--in-words", action="store_true", help="ask in reasoning-gym's words, for a model that reads English"
    )
    top.add_argument("--config", default=RECIPES / "grpo_arithmetic.yaml", help="GRPO recipe")
    top.add_argument("--sft-config", default=RECIPES / "sft_arithmetic.yaml", help="SFT recipe")
    top.add_argument("--num-problems", type=int, default=4000, help="to learn from, at most")
    top.add_argument("--num-held-out", type=int, default=128, help="problems to be judged by")
    flags, rest = top.parse_known_args(argv)
    return flags, *split_overrides(rest)


def in_words(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Problems as reasoning-gym words them, for a model that reads English."""
    ending = f"\nReason step by step, and write the final answer alone behind {MARK}.\n"
    return [row | {"prompt": row["problem"]["question"] + ending} for row in rows]


if __name__ == "__main__":
    raise SystemExit(main())
