# SPDX-License-Identifier: Apache-2.0
"""Teaches a language model to use a tool, from nothing but right and wrong answers: episodes of several turns.

    python examples/calculator_tool.py

downloads nothing. A small GPT-2 reads worked problems such as 48*73+5, half of them solved in the head and half with a
calculator, asked carelessly. Then GRPO (or `--algorithm ppo`) lets it play: what it writes between < and > the
calculator answers, and it reads the answer and goes on. `--without-tool` trains the same model in the same world with
the calculator taken away.

Every field of the recipe is a flag (`--method.num_generations 16`), and so is every field of the SFT recipe
(`--sft.train.total_steps 400`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import jax
from calculator.world import Calculator, Silent, demonstration, make_tokenizer, problems
from rich.console import Console
from rich.table import Table
from stages import RECIPES, add_flags, split_overrides, stopped
from transformers import GPT2Config

import jrl

HELD_OUT_SEED = 1_000_000
ARCHITECTURE = dict(n_layer=4, n_embd=128, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
TURN = {"max_new_tokens": 48, "max_turns": 4, "max_turn_tokens": 14, "do_sample": True}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example; what it leaves is in `--output-dir`."""
    argv = sys.argv[1:] if argv is None else list(argv)
    flags, overrides, sft_overrides = parse(argv)
    began, console, folder = time.perf_counter(), Console(), Path(flags.output_dir)
    world = Silent if flags.without_tool else Calculator
    held_out = problems(flags.num_held_out, HELD_OUT_SEED)
    known = [row["prompt"] for row in held_out]
    train_on = problems(flags.num_problems, HELD_OUT_SEED * (flags.seed + 2), without=known)

    start = flags.model
    if start is None:
        console.rule("Supervised fine-tuning")
        sft_config = jrl.apply_overrides(
            jrl.TRLConfig.load_yaml(RECIPES / "sft_calculator.yaml"), sft_overrides
        )
        start = read_demonstrations(train_on, held_out, folder, sft_config, flags.seed)
        if start is None:
            return stopped(console, argv, folder, "--sft.train.resume_from_checkpoint", folder / "sft")

    console.rule(flags.algorithm.upper())
    config = jrl.TRLConfig.load_yaml(RECIPES / f"{flags.algorithm}_calculator.yaml")
    config = jrl.apply_overrides(config, overrides)
    trainer = jrl.train(
        model_path=str(start),
        environment=world,
        prompts=train_on,
        eval_prompts=held_out,
        stop_sequences=["\n"],
        config=config.evolve(train={"seed": flags.seed, "checkpoint_dir": str(folder / "run")}),
    )
    if trainer.interrupted:
        resume = ("--model", start, "--train.resume_from_checkpoint", folder / "run")
        return stopped(console, argv, folder, *resume)
    trainer.save_pretrained(folder / "policy")
    report(console, folder, trainer.history, seconds=time.perf_counter() - began)
    return 0


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str], list[str]]:
    """The example's own flags, overrides of the recipe, and overrides of the SFT recipe."""
    top = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], allow_abbrev=False, add_help=True
    )
    add_flags(top, run="calculator_tool")
    top.add_argument("--algorithm", choices=["grpo", "ppo"], default="grpo")
    top.add_argument("--without-tool", action="store_true", help="the calculator answers nothing")
    top.add_argument("--num-problems", type=int, default=4000)
    top.add_argument("--num-held-out", type=int, default=128)
    flags, rest = top.parse_known_args(argv)
    return flags, *split_overrides(rest)


def read_demonstrations(
    train_on: Sequence[dict[str, Any]],
    held_out: Sequence[dict[str, Any]],
    folder: Path,
    config: jrl.TRLConfig,
    seed: int,
) -> Path | None:
    """Fine-tunes a policy from scratch on worked problems.

    Args:
      train_on: The problems.
      held_out: Others, on which the policy plays now and then.
      folder: Run folder. `initial` (random weights), `sft` (the run) and `sft_model` (the result) are written there.
      config: SFT recipe.
      seed: Of the demonstrations, the weights and the data order.
    Returns:
      Folder of the trained checkpoint; None if the process was asked to stop.
    """
    random, tokenizer = Random(seed), make_tokenizer()
    architecture = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=config.train.seq_length,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **ARCHITECTURE,
    )
    model, params = jrl.load_model(architecture, key=jax.random.key(seed))
    jrl.save_model(folder / "initial", model, params, tokenizer)
    trainer = jrl.train(
        model_path=str(folder / "initial"),
        samples=[demonstration(problem, random) for problem in train_on],
        eval_prompts=held_out,
        environment=Calculator,
        stop_sequences=["\n"],
        config=config.evolve(train={"seed": seed, "checkpoint_dir": str(folder / "sft")}),
    )
    return None if trainer.interrupted else Path(trainer.save_pretrained(folder / "sft_model"))


def report(
    console: Console, folder: Path, history: Sequence[Mapping[str, Any]], *, seconds: float
) -> dict[str, float]:
    """Prints some episodes and a line of figures; writes `curves.png` and `summary.json`.

    Args:
      console: Where they are printed.
      folder: Run folder; the run is in `run`.
      history: The trainer's records.
      seconds: Wall-clock time of the whole run.
    Returns:
      Share of right answers to held-out problems before and after, and of the last rollouts' episodes the turns.
    """
    rows = [
        json.loads(line) for line in (folder / "run" / "rollouts" / "rollouts.jsonl").open(encoding="utf-8")
    ]
    table = Table(title="Episodes of the last iteration", show_lines=True)
    for name in ("problem", "the policy writes > the calculator answers", "reward"):
        table.add_column(name)
    for row in rows[-8:]:
        said = [f"{turn['output']} > {turn['observation'].strip()}" for turn in row["turns"]]
        table.add_row(row["prompt"].strip(), "\n".join(said), f"{row['reward']:g}")
    console.print(table)
    evaluations = [(record["step"], record["reward/mean"]) for record in history if "evaluation" in record]
    rollouts = [record for record in history if "episode/turns" in record]
    plot(evaluations, rollouts, folder / "curves.png")
    summary = {
        "right_before": evaluations[0][1],
        "right_after": evaluations[-1][1],
        "turns_before": rollouts[0]["episode/turns"],
        "turns_after": rollouts[-1]["episode/turns"],
        "seconds": round(seconds, 1),
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=2), encoding="utf-8")
    console.print(summary)
    return summary


def plot(evaluations: Sequence[tuple[int, float]], rollouts: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the share of right answers, and below the turns of an episode.

    Args:
      evaluations: (optimizer step, share on held-out problems).
      rollouts: Records of the iterations.
      path: PNG to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = [record["step"] for record in rollouts]
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 6), sharex=True, layout="constrained")
    top.plot(steps, [record["reward/mean"] for record in rollouts], alpha=0.4, label="rollouts")
    top.plot(*zip(*evaluations, strict=True), "o-", label="held-out problems")
    top.set_ylabel("share of right answers")
    top.set_ylim(-0.02, 1.02)
    top.legend(frameon=False, loc="lower right")
    bottom.plot(steps, [record["episode/turns"] for record in rollouts])
    bottom.set_ylabel("turns of an episode")
    bottom.set_xlabel("optimizer steps")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
