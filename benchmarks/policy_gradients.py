# SPDX-License-Identifier: Apache-2.0
"""Every policy gradient under one budget on the tasks of `examples/grpo_arithmetic.py`.

    python benchmarks/policy_gradients.py run [--task chain_sum] [--algorithm dapo] [--seed 0 1 2]
    python benchmarks/policy_gradients.py table          # writes docs/policy_gradients.md

All begin with the same checkpoint of a task, and differ in the switches of their name alone: the same step size,
problems, rollouts and number of iterations. A run that is on file already is not made again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from arithmetic.pretrain import pretrain  # noqa: E402
from arithmetic.tasks import TASKS, Task  # noqa: E402
from grpo_arithmetic import HELD_OUT_SEED, SAMPLES  # noqa: E402

import jrl  # noqa: E402
from jrl.learners import ALGORITHMS  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "policy_gradients.jsonl"
PAGE = ROOT / "docs" / "policy_gradients.md"
NUM_ITERATIONS = 60
OWN = "GRPOConfig()"
"""jrl's own defaults."""


def main() -> None:
    """Runs what is missing, or writes the page."""
    top = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    top.add_argument("what", choices=["run", "table"])
    top.add_argument("--task", nargs="+", choices=list(TASKS), default=list(TASKS))
    top.add_argument("--algorithm", nargs="+", choices=[OWN, *ALGORITHMS], default=[OWN, *ALGORITHMS])
    top.add_argument("--seed", type=int, nargs="+", default=[0, 1, 2])
    flags = top.parse_args()
    if flags.what == "table":
        PAGE.write_text(page(list(recorded())), encoding="utf-8")
        return
    done = {(row["task"], row["algorithm"], row["seed"]) for row in recorded()}
    for name in flags.task:
        missing = [
            (algorithm, seed)
            for seed in flags.seed
            for algorithm in flags.algorithm
            if (name, algorithm, seed) not in done
        ]
        if missing:
            run(TASKS[name], missing)


def recorded() -> Iterator[dict[str, Any]]:
    """Runs that are on file."""
    if RESULTS.exists():
        yield from map(json.loads, RESULTS.read_text(encoding="utf-8").splitlines())


def run(task: Task, missing: list[tuple[str, int]]) -> None:
    """Makes runs of a task and adds them to the file, one line each."""
    held_out = task.problems(128, seed=HELD_OUT_SEED)
    problems = task.problems(4000, seed=2 * HELD_OUT_SEED, without=[row["prompt"] for row in held_out])
    verify = task.verifier()
    with tempfile.TemporaryDirectory() as folder:
        recipe = jrl.TRLConfig.load_yaml(ROOT / "configs" / "sft_arithmetic.yaml")
        start = pretrain(task, problems, held_out, Path(folder), config=recipe, seed=0)
        for algorithm, seed in missing:
            config = jrl.TRLConfig.load_yaml(ROOT / "configs" / "grpo_arithmetic.yaml").evolve(
                method={
                    **ALGORITHMS.get(algorithm, {}),
                    "gen_kwargs": {"max_new_tokens": task.max_new_tokens},
                },
                scheduler={"kwargs": {"T_max": NUM_ITERATIONS}},
                train={
                    **{
                        "seed": seed,
                        "checkpoint_dir": f"{folder}/{algorithm}_{seed}",
                        "epochs": NUM_ITERATIONS,
                    },
                    **{"total_steps": NUM_ITERATIONS, "eval_interval": NUM_ITERATIONS},
                },
            )
            began = time.process_time()
            trainer = jrl.train(
                model_path=str(start),
                reward_fn=verify,
                prompts=problems,
                eval_prompts=held_out * SAMPLES,
                config=config,
            )
            before, after = (row["reward/mean"] for row in trainer.history if "evaluation" in row)
            row = {
                "task": task.name,
                "algorithm": algorithm,
                "seed": seed,
                "before": round(before, 4),
                "after": round(after, 4),
                "processor_seconds": round(time.process_time() - began, 1),
            }
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def page(rows: list[dict[str, Any]]) -> str:
    """The page of results."""
    after: Mapping[tuple[str, str], list[float]] = defaultdict(list)
    before: Mapping[str, set[float]] = defaultdict(set)
    for row in rows:
        after[row["algorithm"], row["task"]].append(row["after"])
        before[row["task"]].add(row["before"])
    tasks = [name for name in TASKS if name in before]
    names = sorted(
        {algorithm for algorithm, _ in after},
        key=lambda name: (
            -np.mean([np.mean(after[name, task]) for task in tasks if after[name, task]]),
            name,
        ),
    )
    lines = [
        "# All policy gradients under one budget",
        "",
        "Written by `python benchmarks/policy_gradients.py table` from "
        "[`policy_gradients.jsonl`](../benchmarks/results/policy_gradients.jsonl).",
        "",
        "```bash",
        "python benchmarks/policy_gradients.py run --algorithm dapo --seed 0",
        "```",
        "",
        f"pass@1 on 128 held-out problems, {SAMPLES} samples each, after {NUM_ITERATIONS} iterations of 128 rollouts: "
        "mean, lowest and highest of the seeds. All begin with the same",
        "checkpoint of a task and take the step size of [`grpo_arithmetic.yaml`](../configs/grpo_arithmetic.yaml), "
        "which was chosen with the first defaults in view.",
        "A short budget on small tasks ranks nothing but itself. The first evaluation, too, is drawn by the seed: "
        "cells of different seeds do not compare.",
        "An iteration is one optimizer step, so that ratios are 1: algorithms that differ in ratio and clipping alone "
        "have equal or nearly equal cells.",
        "",
        "| algorithm | "
        + " | ".join(f"{task}, from {np.mean(list(before[task])):.2f}" for task in tasks)
        + " |",
        "|---|" + "---|" * len(tasks),
    ]
    for name in names:
        cells = [_cell(after[name, task]) for task in tasks]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(values: list[float]) -> str:
    if not values:
        return "not run"
    seeds = "1 seed" if len(values) == 1 else f"{len(values)} seeds"
    return f"{np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f}, {seeds})"


if __name__ == "__main__":
    main()
