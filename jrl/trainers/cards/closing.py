# SPDX-License-Identifier: Apache-2.0
"""The end of a run in words: what happened, where things are, what to do next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jrl.trainers.cards.report import change_of_reward, read_run, report
from jrl.trainers.checkpoints.resume import checkpoints_in
from jrl.trainers.loggers.safe_text import one_line
from jrl.trainers.loggers.watch import FOUND

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


def closing_sentence(
    history: Sequence[Mapping[str, Any]],
    *,
    run_dir: Path,
    step: int,
    last_step: int,
    seconds: float,
    writes_text: bool,
    report: str,
) -> str:
    """The last words of a run.

    Args:
      history: Its records.
      run_dir: Its folder.
      step: Optimizer steps that were made.
      last_step: Those that were wanted.
      seconds: What it took.
      writes_text: Whether its model completes prompts.
      report: As `write_report` gives it.
    """
    change = change_of_reward(history)
    rose = "" if change is None else f", mean reward {change[0]:.3g} to {change[1]:.3g} {change[2]}"
    told = sorted({str(record[FOUND]) for record in history if FOUND in record})
    warned = f"; warned of {', '.join(told)}" if told else ""
    newest = max(checkpoints_in(run_dir), default=None)
    if newest is None:
        return f"done: {step} of {last_step} steps in {_duration(seconds)}{rose}{warned}; nothing was saved."
    model = run_dir / f"checkpoint_{newest}" / "hf_model"
    where = f"model in {model}, report: {report}"
    if step < last_step:
        begun = f"stopped at step {step} of {last_step} after {_duration(seconds)}{rose}{warned}"
        return f"{begun}; {where}. To go on: --train.resume_from_checkpoint {run_dir}"
    done = f"done: {step} steps in {_duration(seconds)}{rose}{warned}"
    following = f"try it: jrl generate --model {run_dir} --prompt '...'" if writes_text else "open the report"
    return f"{done}; {where}. Next, {following}"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
