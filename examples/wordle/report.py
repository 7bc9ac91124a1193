# SPDX-License-Identifier: Apache-2.0
"""Table and curves of the runs of `train.py`, beside the exact optimum.

    python -m examples.wordle.report

reads `results/runs.jsonl` and writes `results/returns.png`; the table is printed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..worlds.report import TITLES, Panel, Run, cells, draw, read, select
from .optimum import optimal_return
from .wordle import Wordle

FOLDER = Path(__file__).resolve().parent / "results"
ONLINE = ("ppo",)


def main() -> int:
    """Prints the table and draws the curves."""
    runs = read(FOLDER / "runs.jsonl")
    print(table(runs))
    plot(runs, FOLDER / "returns.png")
    return 0


def table(runs: Sequence[Run]) -> str:
    """Markdown: a row for each algorithm, with mean and range over seeds."""
    lines = [
        "| algorithm | likeliest guesses | sampled guesses | seeds | maximum |",
        "|---|---|---|---|---|",
    ]
    for name, title in TITLES.items():
        found = select(runs, algorithm=name)
        if found:
            lines.append(f"| {title} | {cells(found)} | {optimal_return(Wordle()):.3f} |")
    return "\n".join(lines)


def plot(runs: Sequence[Run], path: Path) -> None:
    """Draws sampled returns: learned from recorded games on the left, by playing on the right."""
    parts = {
        "learned from recorded games": [run for run in runs if run["algorithm"] not in ONLINE],
        "learned by playing": [run for run in runs if run["algorithm"] in ONLINE],
    }
    panels = [Panel(how, found, optimal_return(Wordle())) for how, found in parts.items()]
    title, label = "Wordle; dashed: the exact maximum", "mean return of sampled guesses, 200 words"
    draw(path, panels, title=title, label=label, bottom=-6.2)


if __name__ == "__main__":
    raise SystemExit(main())
