# SPDX-License-Identifier: Apache-2.0
"""The run on the screen: a live display of the figures that matter, or plain lines where nothing can be live."""

from __future__ import annotations

import errno
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import Progress, ProgressColumn, Task
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jrl.trainers.config.method import entries
from jrl.trainers.config.secrets import hide_secrets
from jrl.trainers.loggers.description import END, WARNING
from jrl.trainers.loggers.evaluated_reward import ERROR, MEAN, EvaluatedReward
from jrl.trainers.loggers.jsonl import SAMPLING
from jrl.trainers.loggers.safe_text import for_terminal, one_line
from jrl.trainers.loggers.standard_outputs import mute_lost
from jrl.trainers.loggers.watch import FOUND, say

COUNTERS = ("step", "iteration", "evaluation")

_SHARED = {
    "reward/mean": "reward",
    "kl/per_sequence": "kl",
    "completion/length_mean": "length",
    "perf/tokens_per_second": "tok/s",
    "perf/images_per_second": "images/s",
}
_ORDER = ("reward", "loss", "kl", "accuracy", "margin", "q", "value", "clip", "entropy")
SPEED = ("perf/tokens_per_second", "perf/images_per_second")
"""Headlines that every algorithm has."""
PLAIN_EVERY = 5.0  # seconds between two lines where nothing can be live
QUIET_SECONDS = 10.0  # after which a run without a terminal says what it is doing
BAR = 16  # characters
_PROMPT = 30  # characters of a prompt in the live display
REMEMBERED = 20  # records from which the time that is left is estimated


def headline_names() -> dict[str, str]:
    """Metrics of the console's lines, in order and under short names; metrics.jsonl has the rest.

    Each algorithm's entry names its own; a record of one algorithm has only some of these.
    """
    found = _SHARED | {name: short for entry in entries().values() for name, short in entry.headlines.items()}
    last = [short for short in _SHARED.values() if short not in _ORDER]
    own = [short for short in found.values() if short not in (*_ORDER, *last)]
    order = list(dict.fromkeys((*_ORDER, *own, *last)))
    return dict(sorted(found.items(), key=lambda pair: order.index(pair[1])))


class LastingConsole(Console):
    """A console that raises where nobody reads it any more, which a run outlasts; rich's ends the program."""

    def on_broken_pipe(self) -> None:
        """Raises what the output raised."""
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


class RichConsole:
    """Prints a run's progress.

    Args:
      console: Where to; default: the standard output.
      rows: Rows shown of each table.
      cell_width: Characters shown of each cell.
    """

    def __init__(self, console: Console | None = None, *, rows: int = 4, cell_width: int = 200) -> None:
        self._console = console or LastingConsole()
        self._rows, self._cell_width = rows, cell_width
        self._progress: _Display | None = None
        self._last_line = -math.inf
        self._now: Callable[[], str] | None = None
        self._sample, self._sentence = "", ""
        self._over = threading.Event()
        self._heartbeat: threading.Thread | None = None

    def start(self, description: Mapping[str, Any], *, total_steps: int, step: int) -> None:
        """Prints what runs; starts the live line where the output is a terminal."""
        self._clock = _Clock(total_steps, step, ended_by=" (train.epochs)" if END in description else "")
        for name, value in description.items():
            self._described(name, one_line(hide_secrets(str(value))), "yellow" if name == WARNING else "")
        began = f", resumed at {step}" if step else ""
        self._described("steps", f"{total_steps} optimizer steps{began}", "")
        if self._console.is_terminal:
            self._progress = _Display(self._console, self._clock, self._above)
            self._task = self._progress.add_task("", total=total_steps, completed=step)
            self._progress.start()
        else:
            self._heartbeat = threading.Thread(target=self._beat, name="console", daemon=True)
            self._heartbeat.start()

    def _described(self, name: str, value: str, style: str) -> None:
        """A line of the description; where it is longer than a terminal, it goes on below its beginning."""
        if not self._console.is_terminal:
            self._line(f"{name:>12}  {value}")
            return
        line = Table.grid(padding=(0, 2))
        line.add_column(width=12, justify="right", no_wrap=True)
        line.add_column(overflow="fold")
        line.add_row(Text(name, style=style), Text(value, style=style))
        self._console.print(line)

    def follow(self, now: Callable[[], str]) -> None:
        """Takes what says, at any time, what the run is doing: live, or on a line after a silence."""
        self._now = now

    def see_sample(self, row: Mapping[str, Any]) -> None:
        """Takes the last sample, for the live display."""
        reward = row.get("reward")
        earned = f"{reward:+.3g}  " if isinstance(reward, float) else ""
        prompt, output = one_line(str(row.get("prompt", ""))), one_line(str(row.get("output", "")))
        # The end of a prompt, which its completion follows.
        shown = prompt if len(prompt) <= _PROMPT else f"…{prompt[1 - _PROMPT :]}"
        self._sample = f"{earned}{shown} → {output}"

    def finish(self, sentence: str) -> None:
        """Takes what is said last."""
        self._sentence = sentence

    def _above(self) -> Iterable[RenderableType]:
        """Lines of the live display above the figures: the last sample, and what is being done."""
        if self._over.is_set():
            return
        if self._sample:
            yield Text(self._sample, style="dim", no_wrap=True, overflow="ellipsis")
        if self._now is not None:
            line = Table.grid(padding=(0, 2))
            line.add_row(
                ProgressBar(self._clock.total_steps, self._clock.step, width=BAR),
                Text(self._now(), no_wrap=True, overflow="ellipsis"),
            )
            yield line

    def _beat(self) -> None:
        """Says what is being done whenever nothing was said for a while."""
        silent_since = time.monotonic()
        while not self._over.wait(QUIET_SECONDS / 10):
            silent_since = max(silent_since, self._last_line)
            if self._now is not None and time.monotonic() - silent_since > QUIET_SECONDS:
                silent_since = time.monotonic()
                try:
                    self._line(f"step {self._clock.steps()}  {self._clock.times()}  {self._now()} ...")
                except OSError:  # a full disk has room later; the next record warns of it
                    mute_lost()

    def log(self, record: Mapping[str, Any], step: int) -> None:
        """The headlines of a training record on the live line; evaluations and findings on lines of their own.

        Without a terminal, training records are lines too, but not all of them: a log file is read by people.
        """
        if "evaluation" in record:
            self._line(f"evaluation at step {step}  {one_line('  '.join(_evaluated(record)))}")
            return
        if FOUND in record:
            self._console.print(
                Text(f"warning: {say(record)}", style="yellow"), highlight=False, soft_wrap=True
            )
            return
        self._clock.see(step)
        figures = headlines(record)
        if self._progress is not None:
            self._progress.update(self._task, completed=step, figures=figures)
        elif step >= self._clock.total_steps or time.monotonic() - self._last_line > PLAIN_EVERY:
            self._last_line = time.monotonic()
            self._line("  ".join([f"step {self._clock.steps()}", self._clock.times(), *figures]))

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """The first rows as a table."""
        title = Text(f"{one_line(name)} at step {step}")
        table = Table(title=title, title_justify="left", show_lines=True)
        for column in columns:
            table.add_column(Text(one_line(column)), overflow="fold")
        for row in rows[: self._rows]:
            # Text, not str: a completion may hold what rich would read as markup, and what a terminal would obey.
            table.add_row(*(Text(self._cell(cell)) for cell in row))
        self._console.print(table)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Ends the live display, leaving its figures on the screen, and says how the run ended."""
        self._over.set()
        if self._heartbeat is not None:
            self._heartbeat.join()
            self._heartbeat = None
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        if self._sentence:
            self._line(self._sentence)
            self._sentence = ""

    def _line(self, text: str) -> None:
        self._console.print(Text(text), highlight=False, soft_wrap=True)

    def _cell(self, cell: Any) -> str:
        text = for_terminal(_number(cell) if isinstance(cell, float) else str(cell))
        return text if len(text) <= self._cell_width else text[: self._cell_width - 1] + "…"


def _evaluated(record: Mapping[str, Any]) -> Iterable[str]:
    """Figures of an evaluation, each as "name value"; a mean reward has its error and its samples beside it."""
    for name, value in record.items():
        if name in COUNTERS or name.startswith((SAMPLING, ERROR)):
            continue
        reward = EvaluatedReward.of(record, suffix=name.removeprefix(MEAN)) if name.startswith(MEAN) else None
        yield f"{name} {_number(value) if reward is None else reward}"


def headlines(record: Mapping[str, Any]) -> list[str]:
    """The leading figures of a training record, each as "name value"; of a method of a user's own its losses."""
    names = {name: short for name, short in headline_names().items() if name in record}
    if not names.keys() - set(SPEED):
        names = {name: name for name in record if name.endswith("loss")} | names
    return [f"{one_line(short)} {_number(record[name])}" for name, short in names.items()]


class _Clock:
    """Step and time of a run: how long it has taken, and how long it will.

    Args:
      total_steps: Where it ends.
      step: Where it begins.
      ended_by: Stands behind the steps, and names what ends the run before `train.total_steps`.
    """

    def __init__(self, total_steps: int, step: int, *, ended_by: str = "") -> None:
        self.total_steps, self._began, self._ended_by = total_steps, time.monotonic(), ended_by
        self._seen = deque([(step, self._began)], REMEMBERED)

    def see(self, step: int) -> None:
        """A step is done. Nothing is estimated from the first one: it compiles."""
        if len(self._seen) == 2 and self._seen[0][1] == self._began:
            self._seen.popleft()
        self._seen.append((step, time.monotonic()))

    @property
    def step(self) -> int:
        """The last step that is done."""
        return self._seen[-1][0]

    def steps(self) -> str:
        """Such as "12/250"."""
        return f"{self.step}/{self.total_steps}{self._ended_by}"

    def times(self) -> str:
        """Such as "0:12, 1:05 left"."""
        (first, began), (last, now) = self._seen[0], self._seen[-1]
        elapsed = _duration(time.monotonic() - self._began)
        if last <= first or began == self._began:
            return elapsed
        left = (now - began) / (last - first) * (self.total_steps - last)
        return f"{elapsed}, {_duration(left)} left" if last < self.total_steps else elapsed


class _Display(Progress):
    """The live display: lines that change, above the line of figures.

    Args:
      console: Where it is.
      clock: Tells step and times.
      above: Gives the lines above, anew each time.
    """

    def __init__(
        self, console: Console, clock: _Clock, above: Callable[[], Iterable[RenderableType]]
    ) -> None:
        self._lines_above = above
        super().__init__(_Line(console, clock), console=console, refresh_per_second=4)

    def get_renderables(self) -> Iterable[RenderableType]:
        """The lines of this moment."""
        yield from self._lines_above()
        yield self.make_tasks_table(self.tasks)


class _Line(ProgressColumn):
    """Step, times and as many figures as there is room for.

    Step, times and the first figure are what a user asks for first: these are never cut for others.

    Args:
      console: Tells the width.
      clock: Tells step and times.
    """

    def __init__(self, console: Console, clock: _Clock) -> None:
        super().__init__()
        self._given, self._clock = console, clock

    def render(self, task: Task) -> Text:
        """The line of this moment."""
        room = self._given.width
        line = f"step {self._clock.steps()}  {self._clock.times()}"
        for figure in task.fields.get("figures", ()):
            if len(line) + 2 + len(figure) > room:
                break
            line = f"{line}  {figure}"
        return Text(line, no_wrap=True, overflow="ellipsis")


def _number(value: float) -> str:
    """Three digits, and whole numbers beyond that."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _duration(seconds: float) -> str:
    """Such as "0:12" or "3:04:05"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
