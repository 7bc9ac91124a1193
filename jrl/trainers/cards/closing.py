# SPDX-License-Identifier: Apache-2.0
"""The end of a run in words: what happened, where things are, what to do next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jrl.trainers.cards.report import (
    best_evaluation,
    change_of_reward,
    read_run,
    report,
    start_was_best,
    within_error,
)
from jrl.trainers.checkpoints.draft import MODEL
from jrl.trainers.checkpoints.resume import checkpoints_in
from jrl.trainers.loggers.safe_text import one_line
from jrl.trainers.loggers.watch import FOUND

DEGENERATE = "group/degenerate_iterations"
"""Metric that counts the iterations in which no samples of a prompt differed in their scores."""

REPORT = "report.html"
"""Name of the page in a run's folder."""


def write_report(run_dir: Path) -> str:
    """Writes the page of a run into its folder.

    Args:
      run_dir: Folder of a run that is over.
    Returns:
      Where it is, or why there is none: a full disk must not end a run whose model is saved.
    """
    path = run_dir / REPORT
    try:
        path.write_text(report([read_run(run_dir)]), encoding="utf-8", errors="backslashreplace")
    except (
        Exception
    ) as error:  # of whatever a user's function made a metric of, too: the run is over and saved
        return f"not written ({one_line(str(error)) or type(error).__name__})"
    return str(path)


@dataclass(frozen=True)
class Ending:
    """Facts about a run that has ended.

    Attributes:
      run_dir: Its folder.
      first_step: Optimizer steps before this process resumed it; 0: it began here.
      step: Optimizer steps that were made in all.
      last_step: Those that were wanted, or the most of them.
      total_steps: `train.total_steps`.
      epochs: `train.epochs` in words, such as "3 passes over the samples".
      is_over: Whether there is nothing left to do; else it was stopped.
      unsaved: Whether the disk refused the last checkpoint.
      seconds: What this process took.
      writes_text: Whether the model completes prompts.
      resume_argument: Flag, without its dashes, by which such a run is resumed.
      report: As `write_report` gives it.
    """

    run_dir: Path
    first_step: int
    step: int
    last_step: int
    total_steps: int
    epochs: str
    is_over: bool
    unsaved: bool
    seconds: float
    writes_text: bool
    resume_argument: str
    report: str


def closing_sentence(history: Sequence[Mapping[str, Any]], ending: Ending) -> str:
    """The last words of a run.

    Args:
      history: Its records.
      ending: How it ended.
    """
    saved = checkpoints_in(ending.run_dir)
    newest = max(saved, default=None)
    parts = [f"{_steps(ending)}{_reward(history)}", *_without_lesson(history)]
    if ending.unsaved:
        lost = "nothing was saved" if newest is None else f"steps after {newest} are lost"
        parts.append(f"the last checkpoint could not be written, so {lost}: make room on the disk")
    elif newest is None:
        parts.append("nothing was saved, because no step was made")
    if newest is None:
        return f"{'; '.join(parts)}."
    model, to_try = saved[newest] / MODEL, ending.run_dir
    start = start_was_best(history)
    parts += [start] if start else []
    best = best_evaluation(history, saved.keys())
    if best is not None:
        to_try = saved[best.step] / MODEL
        unsure = within_error(best, history, ", within error of the last")
        parts.append(f"best {best.figure} at step {best.step}{unsure}: {to_try}")
    said = f"{'; '.join(parts)}; model in {model}, report: {ending.report}."
    if ending.unsaved or not ending.is_over:
        return f"{said} To go on: --{ending.resume_argument} {ending.run_dir}"
    if not ending.writes_text:
        return f"{said} Next, open the report"
    return f"{said} Next, try it: jrl generate --model {to_try} --prompt '...'"


def _steps(ending: Ending) -> str:
    """How far the run came, and in what time."""
    taken = _duration(ending.seconds)
    if ending.first_step:
        taken += f" since the resume at step {ending.first_step}"
    if not ending.is_over:
        return f"stopped at step {ending.step} of {ending.last_step} after {taken}"
    cap = ""
    if ending.step < ending.total_steps:
        cap = f"; ended after {ending.epochs} (train.epochs), train.total_steps {ending.total_steps:,} was not reached"
    return f"done: {ending.step} steps in {taken}{cap}"


def _reward(history: Sequence[Mapping[str, Any]]) -> str:
    """What the reward did, and what the watch warned of."""
    change = change_of_reward(history)
    went = f", mean reward {change}" if change else ""
    told = sorted({str(record[FOUND]) for record in history if FOUND in record})
    return f"{went}; warned of {', '.join(told)}" if told else went


def _without_lesson(history: Sequence[Mapping[str, Any]]) -> list[str]:
    """How many iterations had only groups of equal scores; [] where none had."""
    counts = [record[DEGENERATE] for record in history if DEGENERATE in record]
    if not counts or not counts[-1]:
        return []
    of = f"in {counts[-1]:g} of {len(counts)} iterations"
    return [f"{of} no prompt had samples whose scores differ, so they taught nothing"]


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
