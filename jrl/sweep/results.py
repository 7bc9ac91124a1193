# SPDX-License-Identifier: Apache-2.0
"""Results of a sweep: a table, results.jsonl and sweep.png."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from jrl.sweep.plan import SweepPlan
from jrl.trainers.loggers.safe_text import one_line

RESULTS, PLOT = "results.jsonl", "sweep.png"
Status = Literal["done", "stopped", "failed", "waiting"]


@dataclass(frozen=True)
class TrialResult:
    """Result of a trial.

    Attributes:
      trial: Ray's name for it.
      values: Dotted name → value of what was searched; empty where it had not begun.
      status: "done"; "stopped" by the scheduler, the time budget or an interruption; "failed"; "waiting" where it had
        not begun when the sweep ended.
      curve: Step → metric, in order.
      seconds: Until its last report.
      folder: Of the trial.
      error: Last line of a failure.
    """

    trial: str
    values: dict[str, Any]
    status: Status
    curve: dict[int, float]
    seconds: float
    folder: str
    error: str | None = None

    @property
    def last(self) -> float:
        """The metric at the last evaluation; NaN where there is none."""
        return next(reversed(self.curve.values()), math.nan)

    @property
    def last_step(self) -> int:
        """Optimizer steps at the last evaluation."""
        return next(reversed(self.curve), 0)

    def best(self, mode: str) -> float:
        """The best metric of all its evaluations; NaN where none is finite."""
        finite = [value for value in self.curve.values() if math.isfinite(value)]
        return (max if mode == "max" else min)(finite, default=math.nan)


def ranked(results: Sequence[TrialResult], mode: str) -> list[TrialResult]:
    """Best last metric first, as trials without a finite one come last.

    The last metric and not the best one ranks: the best of many noisy evaluations flatters whoever had many.
    """
    sign = -1.0 if mode == "max" else 1.0
    return sorted(results, key=lambda result: sign * result.last if math.isfinite(result.last) else math.inf)


def make_table(plan: SweepPlan, results: Sequence[TrialResult], *, rows: int = 20) -> Table:
    """The best trials, one a row.

    Args:
      plan: What was searched.
      results: Ranked.
      rows: Most rows.
    """
    table = Table(title=f"{plan.metric}, {plan.mode}: {len(results)} trials", title_justify="left")
    for name in ("trial", *_short(plan), "last", "best", "step", "seconds", "status"):
        is_text = name in ("trial", "status")
        table.add_column(
            name, justify="left" if is_text else "right", no_wrap=name != "status", overflow="fold"
        )
    for result in results[:rows]:
        cells = [
            result.trial,
            *(format_value(result.values[name]) if name in result.values else "" for name in plan.parameters),
            format_value(result.last) if result.curve else "",
            format_value(result.best(plan.mode)) if result.curve else "",
            str(result.last_step) if result.curve else "",
            f"{result.seconds:.0f}",
            result.status if result.error is None else f"{result.status}: {result.error[:60]}",
        ]
        # Text, not str: an error may hold what rich would read as markup, and what a terminal would obey.
        table.add_row(*(Text(one_line(cell)) for cell in cells))
    return table


def write_results(folder: Path, plan: SweepPlan, results: Sequence[TrialResult]) -> None:
    """Writes results.jsonl, one trial a line, best first, and sweep.png.

    Args:
      folder: Exists.
      plan: What was searched.
      results: Ranked.
    """
    with (folder / RESULTS).open("w", encoding="utf-8") as file:
        for rank, result in enumerate(results, start=1):
            record = {"rank": rank} | asdict(result)
            record |= {"metric": plan.metric, "last": result.last, "best": result.best(plan.mode)}
            plain = {name: _plain(value) for name, value in record.items()}
            file.write(json.dumps(plain, allow_nan=False, default=str) + "\n")
    plot(folder / PLOT, plan, results)


def plot(path: Path, plan: SweepPlan, results: Sequence[TrialResult]) -> None:
    """The metric over steps, and at the end over each hyperparameter; the best trial stands out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = [result for result in results if math.isfinite(result.last)]
    names = list(plan.parameters)
    columns = min(3, len(names) + 1)
    rows = -(-(len(names) + 1) // columns)
    figure = Figure(figsize=(4.4 * columns, 3.4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False).flat
    curves = next(panels)
    for rank, result in reversed(list(enumerate(drawn))):
        style: dict[str, Any] = (
            {"color": "C3", "linewidth": 2.0, "label": "best"}
            if rank == 0
            else {"color": "0.7", "linewidth": 1}
        )
        marker = "x" if result.status == "stopped" else "o"
        curves.plot(list(result.curve), list(result.curve.values()), marker=marker, markersize=3, **style)
    curves.set(xlabel="optimizer step", ylabel=plan.metric, title="trials (x: stopped early)")
    if drawn:
        curves.legend()
    for name, panel in zip(names, panels, strict=False):
        _scatter(panel, plan, name, drawn)
    for panel in panels:
        panel.set_visible(False)
    figure.savefig(path, dpi=120)


def _scatter(panel: Any, plan: SweepPlan, name: str, drawn: Sequence[TrialResult]) -> None:
    """The last metric over one hyperparameter: on an axis of numbers where it was drawn from an interval."""
    parameter = plan.parameters[name]
    values = [result.values.get(name) for result in drawn]
    if parameter.strategy in ("choice", "grid", "grid_search"):
        labels = list(dict.fromkeys(format_value(value) for value in parameter.values))
        places: list[Any] = [labels.index(format_value(value)) for value in values]
        panel.set_xticks(range(len(labels)), labels)
        panel.set_xlim(-0.5, len(labels) - 0.5)
    else:
        places = values
        if parameter.is_log:
            panel.set_xscale("log")
    colors = ["C3" if rank == 0 else "C0" for rank in range(len(drawn))]
    panel.scatter(places, [result.last for result in drawn], c=colors, s=22)
    panel.set(xlabel=name, ylabel=plan.metric)


def format_value(value: Any) -> str:
    """Three digits of a float; everything else as it is."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _short(plan: SweepPlan) -> list[str]:
    """Last parts of the dotted names, or whole names where those are not enough."""
    ends = [name.rpartition(".")[2] for name in plan.parameters]
    return ends if len(set(ends)) == len(ends) else list(plan.parameters)


def _plain(value: Any) -> Any:
    """JSON has no NaN: what is not finite becomes null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return {str(key): _plain(entry) for key, entry in value.items()} if isinstance(value, dict) else value
