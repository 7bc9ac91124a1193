# SPDX-License-Identifier: Apache-2.0
"""Table and curves of the runs of `train.py`, beside LMRL-Gym's figures and the exact maximum.

    python -m examples.maze.report

reads `results/runs.jsonl` and writes `results/returns.png`; the table is printed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).resolve().parent / "results"
LMRL_GYM: Mapping[str, Mapping[str, float]] = {
    "fully": {"cloning": -72.1, "filtered": -56.4, "mc": -48.1, "ilql": -6.97},
    "partly": {"cloning": -79.5, "filtered": -82.9, "mc": -80.3, "ilql": -52.9},
}
"""Raw mean returns that it reports (arXiv:2311.18232), with models and data of its own."""
MAXIMUM = {"fully": -6.84, "partly": -7.24}
"""Of a player who forgets nothing, by `optimum.py`."""
TITLES = {"cloning": "cloning", "filtered": "filtered cloning", "mc": "Monte Carlo", "ilql": "ILQL"}


def main() -> int:
    """Prints the table and draws the curves."""
    runs = [json.loads(line) for line in (FOLDER / "runs.jsonl").read_text(encoding="utf-8").splitlines()]
    print(table(runs))
    draw(runs, FOLDER / "returns.png")
    return 0


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a row for each world and algorithm, with mean and range over seeds."""
    lines = [
        "| observed | algorithm | likeliest moves | sampled moves | seeds | LMRL-Gym | maximum |",
        "|---|---|---|---|---|---|---|",
    ]
    for observed, theirs in LMRL_GYM.items():
        for name, title in TITLES.items():
            found = _of(runs, observed, name)
            if not found:
                continue
            cells = (spread([run[kind] for run in found]) for kind in ("greedy", "sampled"))
            seeds = ", ".join(str(run["seed"]) for run in found)
            lines.append(
                f"| {observed} | {title} | {' | '.join(cells)} | {seeds} | {theirs[name]} | {MAXIMUM[observed]} |"
            )
    return "\n".join(lines)


def spread(values: Sequence[float]) -> str:
    """Mean and range, such as "-7.1 [-7.5..-6.8]"; one number where all are equal.

    Example:
      >>> spread([-6.84, -7.5]), spread([-6.84, -6.84])
      ('-7.17 [-7.50..-6.84]', '-6.84')
    """
    low, high = min(values), max(values)
    mean = f"{np.mean(values):.2f}"
    return mean if f"{low:.2f}" == f"{high:.2f}" else f"{mean} [{low:.2f}..{high:.2f}]"


def draw(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Sampled returns over optimizer steps, a line a seed."""
    import matplotlib  # here, because it is an extra

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(LMRL_GYM), figsize=(11, 4), sharey=True, layout="constrained")
    for axis, observed in zip(axes, LMRL_GYM, strict=True):
        for color, (name, title) in zip(("C0", "C1", "C2", "C3"), TITLES.items(), strict=True):
            axis.axhline(LMRL_GYM[observed][name], color=color, lw=0.8, ls=":", label=title)
            for run in _of(runs, observed, name):
                curve = {int(step): values[1] for step, values in run["curve"].items() if int(step) > 0}
                axis.plot(list(curve), list(curve.values()), color=color, lw=1.2)
        axis.axhline(MAXIMUM[observed], color="black", lw=0.8, ls="--")
        axis.set(title=f"{observed} observed", xlabel="optimizer steps", ylim=(-105, 0))
        axis.legend(loc="lower right", fontsize=8)
    axes[0].set_ylabel("mean return of sampled moves, 25 starts")
    figure.suptitle("Maze; dashed: the exact maximum, dotted: what LMRL-Gym reports", fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _of(runs: Sequence[Mapping[str, Any]], observed: str, name: str) -> list[Mapping[str, Any]]:
    """Runs of an algorithm in a world, by seed."""
    found = [run for run in runs if run["observed"] == observed and run["algorithm"] == name]
    return sorted(found, key=lambda run: run["seed"])


if __name__ == "__main__":
    raise SystemExit(main())
