# SPDX-License-Identifier: Apache-2.0
"""The curves of a run as a small PNG: loss, reward, KL, accuracy, whichever its records have."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jrl.trainers.loggers.safe_text import one_line

Record = Mapping[str, Any]
Series = tuple[list[float], list[float]]

PLOT = "training.png"
"""The picture's file, beside the card."""
MAX_POINTS = 400
"""Points of a curve that are drawn, evenly spaced: the picture is 320 dots wide."""
MIN_RECORDS = 3
"""Training records below which there is no curve to speak of."""
# Panels in order: label -> names of which the first that a run has is drawn.
_PANELS: Mapping[str, tuple[str, ...]] = {
    "reward": ("reward/mean",),
    "KL per sequence (nats)": ("kl/per_sequence",),
    "accuracy": ("rewards/accuracies", "reward_model/accuracy"),
    "margin": ("rewards/margins", "reward_model/margin"),
}
_HELD_OUT = "eval/"


def plot_run(history: Sequence[Record], path: Path) -> bool:
    """Draws the run's curves, those of its evaluations as dots.

    Only matplotlib's objects are used, and none of its global state: this runs on the thread that writes checkpoints,
    beside whatever the user draws.

    Args:
      history: A trainer's records.
      path: PNG to write.
    Returns:
      Whether there was anything to draw, and matplotlib to draw it.
    """
    training = [record for record in history if "iteration" in record]
    evaluations = [record for record in history if "evaluation" in record]
    panels = _panels(training, evaluations)
    if len(training) < MIN_RECORDS or not panels or not _have_matplotlib():
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(panels), 2.4), dpi=100)
    FigureCanvasAgg(figure)
    figure.subplots_adjust(left=0.2 / len(panels) + 0.02, right=0.98, bottom=0.2, top=0.88, wspace=0.3)
    for number, (label, drawn, measured) in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), number)
        axes.plot(*drawn, color="tab:blue", linewidth=1)
        axes.plot(*measured, "o", color="tab:orange", markersize=3)
        axes.set_title(one_line(label), fontsize=8, parse_math=False)
        axes.set_xlabel("optimizer steps", fontsize=7)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.25)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.savefig(path, format="png")
    return True


@functools.cache
def _have_matplotlib() -> bool:
    """True where matplotlib is installed; warns, once, where it is not."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        warnings.warn(
            f"No {PLOT} is drawn beside the model card: pip install 'jrl-post[plots]' ({error}).",
            stacklevel=4,
        )
        return False
    return True


def _panels(training: Sequence[Record], evaluations: Sequence[Record]) -> list[tuple[str, Series, Series]]:
    """(label, curve of training, dots of evaluations) of every quantity that the run has."""
    names = {name for record in (*training, *evaluations) for name in record}
    losses = sorted(name for name in names if name.endswith("/loss") and not name.startswith(_HELD_OUT))
    chosen = dict.fromkeys(losses, "loss") if len(losses) == 1 else {name: name for name in losses}
    found = [(label, name) for name, label in chosen.items()]
    for label, candidates in _PANELS.items():
        found += [(label, name) for name in candidates if name in names][:1]
    panels = [
        (label, _series(training, (name,)), _series(evaluations, (f"{_HELD_OUT}{name}", name)))
        for label, name in found
    ]
    return [(label, drawn, dots) for label, drawn, dots in panels if drawn[0] or dots[0]]


def _series(records: Sequence[Record], names: Sequence[str]) -> Series:
    """Steps and finite values of the first of the names that a record has, thinned out."""
    points = [
        (float(record["step"]), float(record[name]))
        for record in records
        for name in [next((name for name in names if name in record), "")]
        if name and math.isfinite(record[name])
    ]
    stride = math.ceil(len(points) / MAX_POINTS) or 1
    kept = points[::-stride][::-1]  # the last point is always among them
    return [step for step, _ in kept], [value for _, value in kept]
