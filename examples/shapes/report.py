# SPDX-License-Identifier: Apache-2.0
"""What DDPO made of the toy model: a table of the seeds, and one picture of curves and images."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from .pictures import PROMPTS

STANDARD_ERRORS = 3.0
"""How many of them a rise must measure to be called one."""


@dataclass(frozen=True)
class Outcome:
    """One seed.

    Attributes:
      seed: Of prompts, noise and order.
      curve: Mean reward of every epoch's samples.
      before: Rewards of the fixed evaluation samples under the model as it was pretrained.
      after: Of the same prompts and noises under the trained one.
      images_before: Some of these samples, (rows, prompts, height, width, 3).
      images_after: The same ones after training.
      seconds: Wall-clock time of DDPO, compilation and evaluations included.
      processor_seconds: Processor time of the same.
      figures: Other figures of the run, by name.
    """

    seed: int
    curve: Sequence[float]
    before: np.ndarray
    after: np.ndarray
    images_before: np.ndarray
    images_after: np.ndarray
    seconds: float
    processor_seconds: float
    figures: Mapping[str, float]

    @property
    def rise(self) -> float:
        """Mean rise of the reward, sample by sample."""
        return float(np.mean(self.after - self.before))

    @property
    def standard_error(self) -> float:
        """Of that mean."""
        difference = np.asarray(self.after - self.before, np.float64)
        return float(difference.std(ddof=1) / math.sqrt(len(difference)))

    def record(self) -> dict[str, Any]:
        """What is kept of it: plain numbers."""
        return {
            "seed": self.seed,
            "reward_before": round(float(np.mean(self.before)), 5),
            "reward_after": round(float(np.mean(self.after)), 5),
            "std_before": round(float(np.std(self.before, ddof=1)), 5),
            "rise": round(self.rise, 5),
            "standard_error": round(self.standard_error, 6),
            "samples": len(self.before),
            "seconds": round(self.seconds, 1),
            "processor_seconds": round(self.processor_seconds, 1),
            **self.figures,
            "curve": [round(float(value), 5) for value in self.curve],
        }


def print_table(console: Console, outcomes: Sequence[Outcome], *, reward: str) -> None:
    """One line a seed: reward on the same samples before and after, and how sure the rise is."""
    table = Table(title=f"{reward}: the same prompts and noises before and after DDPO")
    for name in ("seed", "before", "after", "rise", "standard error", "rise / error", "seconds", "processor"):
        table.add_column(name, justify="right")
    for outcome in outcomes:
        table.add_row(
            str(outcome.seed),
            f"{np.mean(outcome.before):.4f}",
            f"{np.mean(outcome.after):.4f}",
            f"{outcome.rise:+.4f}",
            f"{outcome.standard_error:.4f}",
            f"{outcome.rise / max(outcome.standard_error, 1e-12):.1f}",
            f"{outcome.seconds:.0f}",
            f"{outcome.processor_seconds:.0f}",
        )
    console.print(table)
    if len(outcomes) > 1:
        rises = np.asarray([outcome.rise for outcome in outcomes])
        error = rises.std(ddof=1) / math.sqrt(len(rises))
        console.print(
            f"mean rise over {len(rises)} seeds {rises.mean():+.4f}, standard error over seeds {error:.4f}",
            highlight=False,
        )


def draw_report(path: Path, outcomes: Sequence[Outcome], *, reward: str, samples_per_epoch: int) -> None:
    """Draws the reward of every seed, and the first seed's images before and after from equal noise.

    Args:
      path: PNG to write.
      outcomes: One a seed.
      reward: Name of the reward, on the axis.
      samples_per_epoch: Said on the axis.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    first = outcomes[0]
    figure = plt.figure(figsize=(11, 6.2), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(1.25, 1.0))
    axes = top.subplots()
    for outcome in outcomes:
        epochs = np.arange(len(outcome.curve))
        (line,) = axes.plot(epochs, outcome.curve, linewidth=1.4, label=f"seed {outcome.seed}")
        ends = (0, len(outcome.curve))
        values = (np.mean(outcome.before), np.mean(outcome.after))
        axes.plot(ends, values, "o", color=line.get_color(), markersize=6, clip_on=False)
    axes.plot([], [], "o", color="gray", label=f"{len(first.before)} fixed samples, before and after")
    axes.set_xlabel(f"epochs of {samples_per_epoch} samples before these were drawn")
    axes.set_ylabel(f"reward: {reward}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="best")
    sides = bottom.subplots(1, 2)
    for side, images, word in zip(
        sides, (first.images_before, first.images_after), ("before", "after"), strict=True
    ):
        _draw_grid(side, images, f"{word} DDPO, seed {first.seed}")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_grid(axes: Any, images: np.ndarray, title: str) -> None:
    """Rows of noises by columns of prompts, with a white line between pictures."""
    rows, columns, height, width, _ = images.shape
    gap = 1
    canvas = np.ones((rows * (height + gap) - gap, columns * (width + gap) - gap, 3), np.float32)
    for row in range(rows):
        for column in range(columns):
            down, right = row * (height + gap), column * (width + gap)
            canvas[down : down + height, right : right + width] = images[row, column]
    axes.imshow(canvas, interpolation="nearest")
    axes.set_xticks(
        [column * (width + gap) + (width - 1) / 2 for column in range(columns)],
        [prompt.replace(" ", "\n") for prompt in PROMPTS[:columns]],
        fontsize=8,
    )
    axes.set_yticks(
        [row * (height + gap) + (height - 1) / 2 for row in range(rows)],
        [f"noise {row}" for row in range(rows)],
        fontsize=8,
    )
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(title, fontsize=10)
