# SPDX-License-Identifier: Apache-2.0
"""Tables and curves of the runs of a world."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

TITLES = {
    "cloning": "cloning",
    "filtered": "filtered cloning",
    "mc": "Monte Carlo",
    "ilql": "ILQL",
    "ppo": "PPO, online",
}
"""Algorithms by name, in the order of tables."""

Run = Mapping[str, Any]
"""A line of results."""


@dataclass(frozen=True)
class Panel:
    """A plot of a figure.

    Attributes:
      title: Above it.
      runs: Whose curves it shows, a line a seed and a color an algorithm.
      maximum: A dashed line.
      reported: Algorithm → figure of another source, a dotted line.
    """

    title: str
    runs: Sequence[Run]
    maximum: float
    reported: Mapping[str, float] = field(default_factory=dict)


def read(path: Path) -> list[Run]:
    """The runs of a file of results."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def select(runs: Sequence[Run], **labels: Any) -> list[Run]:
    """Runs with these labels, by seed."""
    found = [run for run in runs if all(run[name] == value for name, value in labels.items())]
    return sorted(found, key=lambda run: run["seed"])


def cells(runs: Sequence[Run]) -> str:
    """Cells of a table: likeliest actions, sampled ones, seeds."""
    figures = (spread([run[kind] for run in runs]) for kind in ("greedy", "sampled"))
    return " | ".join([*figures, ", ".join(str(run["seed"]) for run in runs)])


def spread(values: Sequence[float]) -> str:
    """Mean and range, such as "-7.1 [-7.5..-6.8]"; one number where all are equal.

    Example:
      >>> spread([-6.84, -7.5]), spread([-6.84, -6.84])
      ('-7.17 [-7.50..-6.84]', '-6.84')
    """
    low, high = min(values), max(values)
    mean = f"{np.mean(values):.2f}"
    return mean if f"{low:.2f}" == f"{high:.2f}" else f"{mean} [{low:.2f}..{high:.2f}]"


def draw(path: Path, panels: Sequence[Panel], *, title: str, label: str, bottom: float) -> None:
    """Draws sampled returns over optimizer steps.

    Args:
      path: PNG to write.
      panels: Plots side by side.
      title: Of the figure.
      label: Of the returns.
      bottom: The lowest return that is shown.
    """
    import matplotlib  # here, because it is an extra

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(panels), figsize=(1 + 5 * len(panels), 4), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, panel in zip(axes[0], panels, strict=True):
        for number, (name, algorithm) in enumerate(TITLES.items()):
            runs, color = select(panel.runs, algorithm=name), f"C{number}"
            for run in runs:
                curve = {int(step): values[1] for step, values in run["curve"].items()}
                axis.plot(
                    list(curve),
                    list(curve.values()),
                    color=color,
                    lw=1.2,
                    label=algorithm if run is runs[0] else None,
                )
            if runs and name in panel.reported:
                axis.axhline(panel.reported[name], color=color, lw=0.8, ls=":")
        axis.axhline(panel.maximum, color="black", lw=0.8, ls="--")
        axis.set(title=panel.title, xlabel="optimizer steps", ylim=(bottom, 0))
        if panel.runs:
            axis.legend(loc="best", fontsize=8)
    axes[0][0].set_ylabel(label)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)
