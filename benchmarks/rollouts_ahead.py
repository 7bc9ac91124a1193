# SPDX-License-Identifier: Apache-2.0
"""Reward over steps and over seconds with rollouts 0, 1 and 4 iterations ahead, where an environment takes two seconds.

    python benchmarks/rollouts_ahead.py

GRPO on the problems of examples/calculator_tool.py, whose calculator takes two seconds to answer here. Each run is made
twice: once whole, and once killed (SIGKILL) after its first checkpoint and resumed. Both must end with the same
parameters and records, to the bit. Writes benchmarks/results/rollouts_ahead.json and docs/rollouts_ahead.png.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT)]

import calculator_tool as example  # noqa: E402
from calculator.world import Calculator, problems  # noqa: E402

import jrl  # noqa: E402

AHEAD = (0, 1, 4)
SECONDS = 2.0
CLOCKS = ("time/", "perf/")


class Slow(Calculator):
    """The calculator, which thinks for two seconds; as many as there are episodes think at a time."""

    workers = 64

    def step(self, text: str) -> Any:
        """As the calculator's, later."""
        time.sleep(SECONDS)
        return super().step(text)


def main() -> None:
    """Makes all runs, or one of them."""
    flags = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    flags.add_argument("--one", type=int, help="make this run alone, in `--folder`")
    flags.add_argument("--folder", type=Path)
    flags.add_argument("--iterations", type=int, default=24)
    given = flags.parse_args()
    if given.one is not None:
        one(given.one, given.folder, given.iterations)
        return
    with tempfile.TemporaryDirectory() as name:
        compare(Path(name), given.iterations)


def one(ahead: int, folder: Path, iterations: int) -> None:
    """A run, which goes on from its own folder; leaves `result.json` there."""
    config = jrl.TRLConfig.load_yaml(ROOT / "configs" / "grpo_calculator.yaml").evolve(
        method={"num_rollouts": 64, "chunk_size": 64},
        train={
            "batch_size": 64,
            "total_steps": iterations,
            "epochs": iterations,
            "rollouts_ahead": ahead,
            "eval_interval": 0,
            "checkpoint_interval": 8,
            "checkpoint_dir": str(folder),
            "resume_from_checkpoint": str(folder),
        },
    )
    trainer = jrl.train(
        model_path=str(folder.parent / "sft_model"),
        environment=Slow,
        prompts=problems(2000, 2 * example.HELD_OUT_SEED),
        eval_prompts=problems(16, example.HELD_OUT_SEED),
        stop_sequences=["\n"],
        config=config,
    )
    records = [record for record in trainer.history if "iteration" in record]
    same = [{k: v for k, v in record.items() if not k.startswith(CLOCKS)} for record in records]
    digest = hashlib.sha256(json.dumps(same, sort_keys=True).encode())
    for leaf in jax.tree.leaves(trainer.params):
        digest.update(np.asarray(leaf).tobytes())
    found = {
        "ahead": ahead,
        "reward": [record["reward/mean"] for record in records],
        "seconds": np.cumsum([record["time/iteration"] for record in records]).round(2).tolist(),
        "sha256": digest.hexdigest(),
    }
    (folder / "result.json").write_text(json.dumps(found), encoding="utf-8")


def compare(folder: Path, iterations: int) -> None:
    """All runs, each in a process of its own."""
    sft = jrl.TRLConfig.load_yaml(ROOT / "configs" / "sft_calculator.yaml")
    train_on = problems(2000, 2 * example.HELD_OUT_SEED)
    example.read_demonstrations(train_on, problems(16, example.HELD_OUT_SEED), folder, sft, seed=0)
    results = []
    for ahead in AHEAD:
        command = [sys.executable, __file__, "--one", str(ahead), "--iterations", str(iterations)]
        whole, killed = folder / f"whole_{ahead}", folder / f"killed_{ahead}"
        subprocess.run([*command, "--folder", str(whole)], check=True, stdout=subprocess.DEVNULL)
        process = subprocess.Popen([*command, "--folder", str(killed)], stdout=subprocess.DEVNULL)
        while process.poll() is None and not (killed / "checkpoint_8").exists():
            time.sleep(0.1)
        time.sleep(3.0)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it was to be killed on its way"
        subprocess.run([*command, "--folder", str(killed)], check=True, stdout=subprocess.DEVNULL)
        found, resumed = (json.loads((path / "result.json").read_text()) for path in (whole, killed))
        assert found["sha256"] == resumed["sha256"], f"ahead {ahead}: killed and resumed, it is another run"
        results.append(found)
        quick = np.diff([0.0, *found["seconds"]])[5:]
        print(
            f"ahead {ahead}: {np.median(quick):.2f} s an iteration, {found['seconds'][-1]:.0f} s in all, last rewards "
            f"{np.mean(found['reward'][-4:]):.3f}; killed and resumed: equal to the bit",
            flush=True,
        )
    (ROOT / "benchmarks" / "results" / "rollouts_ahead.json").write_text(
        json.dumps(results, indent=1) + "\n", encoding="utf-8"
    )
    plot(results)


def plot(results: list[dict[str, Any]]) -> None:
    """Draws rewards over steps and over seconds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), sharey=True, layout="constrained")
    for found in results:
        steps = range(1, 1 + len(found["reward"]))
        left.plot(steps, found["reward"], label=f"{found['ahead']} ahead")
        right.plot(found["seconds"], found["reward"])
    left.set_xlabel("iterations")
    left.set_ylabel("share of right answers, rollouts")
    left.legend(frameon=False)
    right.set_xlabel("seconds")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(ROOT / "docs" / "rollouts_ahead.png", dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
