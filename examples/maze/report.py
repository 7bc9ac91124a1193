# SPDX-License-Identifier: Apache-2.0
"""Table and curves of the runs of `train.py`, beside LMRL-Gym's figures and the exact maximum.

    python -m examples.maze.report

reads `results/runs.jsonl` and writes `results/returns.png` and `results/online.png`; the table is printed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..worlds.report import TITLES, Panel, Run, cells, draw, read, select

FOLDER = Path(__file__).resolve().parent / "results"
LMRL_GYM: Mapping[str, Mapping[str, float]] = {
    "fully": {"cloning": -72.1, "filtered": -56.4, "mc": -48.1, "ilql": -6.97, "ppo": -37.7},
    "partly": {"cloning": -79.5, "filtered": -82.9, "mc": -80.3, "ilql": -52.9, "ppo": -91.7},
}
"""Raw mean returns that it reports (arXiv:2311.18232), with models and data of its own."""
MAXIMUM = {"fully": -6.84, "partly": -7.24}
"""Of a player who forgets nothing, by `optimum.py`."""
ONLINE = ("ppo",)


def main() -> int:
    """Prints the table and draws the curves."""
    runs = read(FOLDER / "runs.jsonl")
    print(table(runs))
    recorded = [run for run in runs if run["algorithm"] not in ONLINE]
    plot(recorded, FOLDER / "returns.png", "learned from recorded episodes")
    plot([run for run in runs if run["algorithm"] in ONLINE], FOLDER / "online.png", "learned by playing")
    return 0


def table(runs: Sequence[Run]) -> str:
    """Markdown: a row for each world and algorithm, with mean and range over seeds."""
    lines = [
        "| observed | algorithm | likeliest moves | sampled moves | seeds | LMRL-Gym | maximum |",
        "|---|---|---|---|---|---|---|",
    ]
    for observed, theirs in LMRL_GYM.items():
        for name, title in TITLES.items():
            found = select(runs, observed=observed, algorithm=name)
            if found:
                lines.append(
                    f"| {observed} | {title} | {cells(found)} | {theirs[name]} | {MAXIMUM[observed]} |"
                )
    return "\n".join(lines)


def plot(runs: Sequence[Run], path: Path, how: str) -> None:
    """Draws sampled returns, a plot for each world that was learned."""
    panels = [
        Panel(f"{observed} observed", found, MAXIMUM[observed], reported)
        for observed, reported in LMRL_GYM.items()
        if (found := select(runs, observed=observed))
    ]
    title = f"Maze, {how}\ndashed: the exact maximum, dotted: what LMRL-Gym reports"
    draw(path, panels, title=title, label="mean return of sampled moves, 25 starts", bottom=-105)


if __name__ == "__main__":
    raise SystemExit(main())
