# SPDX-License-Identifier: Apache-2.0
"""A trial in a process of its own: the script's `main(hparams)`, watched while its trainers run."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jrl.trainers.checkpoints.resume import checkpoints_in
from jrl.trainers.loop.hooks import Hooks, watch

RUN = "run"  # folder of the trial's run inside its own
FINISHED = "finished"  # empty file beside it, written when `main` came to its end
FAILURE = "failure.txt"  # one line beside it, where `main` raised


class Reporter:
    """Turns a trainer's records into reports: one for each evaluation that has the metric.

    The evaluation before the first step is left out: it says nothing of the hyperparameters.

    Args:
      metric: What the sweep is about.
      report: Takes each report; a scheduler may end the process inside it.
    """

    def __init__(self, metric: str, report: Callable[[dict[str, Any]], None]) -> None:
        self._metric, self._report = metric, report
        self._training: dict[str, Any] = {}
        self._others: dict[str, Any] = {}
        self._num_reports = 0

    def log(self, record: dict[str, Any]) -> None:
        """Keeps a training record: the next evaluation may be judged by what it holds."""
        self._training = record

    def evaluate(self, record: dict[str, Any]) -> None:
        """Reports an evaluation together with the training record before it."""
        if record["step"] == 0:
            return
        merged = _numbers(self._training) | _numbers(record)
        if self._metric in merged:
            self._num_reports += 1
            self._report(merged)
        else:
            self._others = merged

    def finish(self) -> None:
        """Called when the script has ended.

        Raises:
          ValueError: If there was nothing to report.
        """
        if not self._num_reports:
            found = (
                f"they had {sorted(self._others)}" if self._others else "there was none after the first step"
            )
            raise ValueError(f"no evaluation had the metric `{self._metric}`: {found}.")


def load_main(script: str | os.PathLike[str]) -> Callable[[dict[str, Any]], Any]:
    """`main` of a script that is not run as one; what lies beside it can be imported by it.

    Raises:
      FileNotFoundError: If there is no such file.
      ValueError: If it has no function `main` that takes one argument.
    """
    path = Path(script).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"there is no script {script}.")
    for folder in (str(Path.cwd()), str(path.parent)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    name = f"sweep_script_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{script} must be a Python file, ending in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses and pickles of the script look
    spec.loader.exec_module(module)
    main = vars(module).get("main")
    if not callable(main) or not _takes_one(main):
        raise ValueError(
            f"{script} must have a function `main(hparams)`, which takes a dict of dotted names such as "
            "`optimizer.kwargs.lr` and calls `jrl.train`."
        )
    found: Callable[[dict[str, Any]], Any] = main
    return found


def run_trial(
    values: Mapping[str, Any],
    *,
    script: str,
    metric: str,
    folder: Path,
    report: Callable[[dict[str, Any]], None],
) -> None:
    """Runs the script with these values, its run in a folder of the trial's.

    A trial that a scheduler paused starts again here: it goes on from its last whole checkpoint, or from the start.

    Args:
      values: Dotted name → value.
      script: Its path.
      metric: See `Reporter`.
      folder: Of the trial.
      report: See `Reporter`.
    """
    run = folder / RUN
    known = sorted(checkpoints_in(run))
    again = {"train.resume_from_checkpoint": str(run)} if known else {"train.overwrite": True}
    reporter = Reporter(metric, report)
    try:
        with watch(Hooks(log=reporter.log, evaluate=reporter.evaluate)):
            load_main(script)({"train.checkpoint_dir": str(run), **again, **values})
        reporter.finish()
    except (Exception, SystemExit) as error:
        (folder / FAILURE).write_text(f"{type(error).__name__}: {first_line(error)}\n", encoding="utf-8")
        if isinstance(error, SystemExit):  # which Ray would not see
            raise RuntimeError(f"`main` of {script} called sys.exit({error.code!r}).") from error
        raise
    (folder / FINISHED).touch()


def plain(value: Any) -> Any:
    """A value as Python has it: some searchers draw NumPy's numbers, which no configuration takes."""
    return value.item() if isinstance(value, np.generic) else value


def first_line(error: BaseException) -> str:
    """First line of an error's text; its class where it has none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _takes_one(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind({})
    except TypeError:
        return False
    return True


def _numbers(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if isinstance(value, int | float)}
