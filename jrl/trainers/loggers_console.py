# SPDX-License-Identifier: Apache-2.0
"""The run on the screen: a live progress bar and the figures that matter, or plain lines where nothing can be live."""

from __future__ import annotations

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

# What a glance needs, in this order; metrics.jsonl has the rest. Prefixes pick families of names.
HEADLINES = (
    "reward/mean",
    "metrics/",
    "kl/per_sequence",
    "kl/coef",
    "sft/loss",
    "ppo/policy_loss",
    "ppo/value_loss",
    "completion/length_mean",
    "time/iteration",
    "perf/tokens_per_second",
)


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
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}"),
                console=self._console,
            )
            self._task = self._progress.add_task("", total=total_steps, completed=step)
            self._progress.start()

    def log(self, record: Mapping[str, Any], step: int) -> None:
        """One line with the headlines; an evaluation is marked as such."""
        figures = "  ".join(f"{name} {record[name]:.4g}" for name in _headlines(record))
        kind = "evaluation" if "evaluation" in record else "step"
        if self._progress is not None:
            if kind == "step":
                self._progress.update(self._task, completed=step, description=figures)
                return
            self._progress.update(self._task, completed=step)
        line = Text(f"{kind} {step}/{self._total_steps}  {figures}")
        self._console.print(line, highlight=False, soft_wrap=True)

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

    def _cell(self, cell: Any) -> str:
        text = f"{cell:.4g}" if isinstance(cell, float) else str(cell)
        return text if len(text) <= self._cell_width else text[: self._cell_width - 1] + "…"


def _headlines(record: Mapping[str, Any]) -> list[str]:
    """Names of a record that are shown: sweep suffixes and families included."""
    return [
        name
        for headline in HEADLINES
        for name in record
        if name == headline
        or name.startswith((headline + "@", headline if headline.endswith("/") else headline + "@"))
    ]
