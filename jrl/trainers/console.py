# SPDX-License-Identifier: Apache-2.0
"""What a run shows on the terminal: a live progress line, evaluations as tables; plain lines where there is no terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

SHOWN = {
    "reward/mean": "reward",
    "kl/per_sequence": "KL",
    "ppo/clip_fraction": "clip",
    "completion/length_mean": "length",
    "sft/loss": "loss",
    "optim/grad_norm": "grad",
    "perf/tokens_per_second": "tok/s",
}
TABLE_ROWS = 4
PLAIN_EVERY = 10  # records between two plain lines


def number(value: float) -> str:
    """Three significant digits, without an exponent where that is shorter."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


class ConsoleLogger:
    """The terminal. Without one (a file, a pipe) it prints plain lines, not every record."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console if console is not None else Console()
        self._progress: Progress | None = None
        self._records = 0

    def start(self, description: Mapping[str, Any], *, total_steps: int, step: int) -> None:
        """Prints the run's description and opens the progress line."""
        for name, value in description.items():
            self._console.print(Text.assemble((f"{name:>12}  ", "dim"), str(value)))
        self._total = total_steps
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=20),
                TimeRemainingColumn(),
                TextColumn("{task.fields[figures]}", markup=False),
                console=self._console,
            )
            self._task = self._progress.add_task("", total=total_steps, completed=step, figures="")
            self._progress.start()

    def log(self, record: Mapping[str, Any], step: int) -> None:
        """Shows a training record's main figures; an evaluation's are the title of its table."""
        if "evaluation" in record:
            shown = {name: value for name, value in record.items() if name not in ("step", "evaluation")}
            self._line(f"evaluation at step {step}: " + _figures(shown, {name: name for name in shown}))
            return
        figures = _figures(record, SHOWN)
        if self._progress is not None:
            self._progress.update(self._task, completed=step, figures=figures)
        elif self._records % PLAIN_EVERY == 0 or step == self._total:
            self._line(f"step {step}/{self._total}: {figures}")
        self._records += 1

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Shows the first rows of a table, values of different prompts beside each other."""
        if not rows:
            return
        table = Table(title=f"{name}, step {step}", title_justify="left", show_lines=True)
        for column in columns:
            table.add_column(column, overflow="fold", ratio=None if column == "reward" else 1)
        for row in rows[:TABLE_ROWS]:
            table.add_row(*(Text(number(cell) if isinstance(cell, float) else str(cell)) for cell in row))
        self._console.print(table)

    def close(self) -> None:
        """Ends the live display."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _line(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)


def _figures(record: Mapping[str, Any], names: Mapping[str, str]) -> str:
    return "  ".join(
        f"{short} {number(record[name])}" for name, short in names.items() if isinstance(record.get(name), int | float)
    )
