# SPDX-License-Identifier: Apache-2.0
"""The run on the screen: a live progress bar and the figures that matter, or plain lines where nothing can be live."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from jrl.trainers.loggers_jsonl import SAMPLING

COUNTERS = ("step", "iteration", "evaluation")

# What a glance needs, in this order and under a short name; metrics.jsonl has the rest.
HEADLINES = {
    "reward/mean": "reward",
    "kl/per_sequence": "kl",
    "sft/loss": "loss",
    "ppo/clip_fraction": "clip",
    "completion/length_mean": "length",
    "perf/tokens_per_second": "tok/s",
    "perf/images_per_second": "images/s",
}
PLAIN_EVERY = 5.0  # seconds between two lines where nothing can be live


class RichConsole:
    """Prints a run's progress.

    Args:
      console: Where to; default: the standard output.
      rows: Rows shown of each table.
      cell_width: Characters shown of each cell.
    """

    def __init__(self, console: Console | None = None, *, rows: int = 4, cell_width: int = 200) -> None:
        self._console = console or Console()
        self._rows, self._cell_width = rows, cell_width
        self._total_steps = 0
        self._progress: Progress | None = None
        self._last_line = -math.inf

    def start(self, description: Mapping[str, Any], *, total_steps: int, step: int) -> None:
        """Prints what runs; starts the bar where the output is a terminal."""
        self._total_steps = total_steps
        for name, value in description.items():
            self._console.print(Text(f"{name:>12}  {value}"), highlight=False)
        began = f", resumed at {step}" if step else ""
        self._console.print(Text(f"{'steps':>12}  {total_steps} optimizer steps{began}"), highlight=False)
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("step"),
                BarColumn(bar_width=16),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}"),
                console=self._console,
            )
            self._task = self._progress.add_task("", total=total_steps, completed=step)
            self._progress.start()

    def log(self, record: Mapping[str, Any], step: int) -> None:
        """The headlines of a training record on the live line; an evaluation's figures on a line of their own.

        Without a terminal, training records are lines too, but not all of them: a log file is read by people.
        """
        if "evaluation" in record:
            names = (name for name in record if name not in COUNTERS and not name.startswith(SAMPLING))
            figures = "  ".join(f"{name} {_number(record[name])}" for name in names)
            self._line(f"evaluation at step {step}  {figures}")
            return
        figures = "  ".join(
            f"{short} {_number(record[name])}" for name, short in HEADLINES.items() if name in record
        )
        if self._progress is not None:
            self._progress.update(self._task, completed=step, description=figures)
        elif step >= self._total_steps or time.monotonic() - self._last_line > PLAIN_EVERY:
            self._last_line = time.monotonic()
            self._line(f"step {step}/{self._total_steps}  {figures}")

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """The first rows as a table."""
        table = Table(title=f"{name} at step {step}", title_justify="left", show_lines=True)
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows[: self._rows]:
            # Text, not str: a completion may hold what rich would read as markup.
            table.add_row(*(Text(self._cell(cell)) for cell in row))
        self._console.print(table)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Ends the bar, leaving its last state on the screen."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _line(self, text: str) -> None:
        self._console.print(Text(text), highlight=False, soft_wrap=True)

    def _cell(self, cell: Any) -> str:
        text = _number(cell) if isinstance(cell, float) else str(cell)
        return text if len(text) <= self._cell_width else text[: self._cell_width - 1] + "…"


def _number(value: float) -> str:
    """Three digits, and whole numbers beyond that."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
