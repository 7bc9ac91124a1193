# SPDX-License-Identifier: Apache-2.0
"""TensorBoard and Weights & Biases. Both are extras, imported only by the run that names them.

Figures of an evaluation stand under `eval/`: a rollout and an evaluation of the same step share names otherwise.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import yaml

from jrl.trainers.loggers.jsonl import SAMPLING
from jrl.trainers.loggers.safe_text import code_block, for_markdown, for_terminal
from jrl.trainers.loggers.watch import FOUND, say

COUNTERS = ("step", "iteration", "evaluation")
PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
"""Package of each tracker; the extra that brings it has the tracker's name."""


class MissingTrackerError(ImportError):
    """A tracker whose package is not installed.

    Args:
      tracker: Its name.
    """

    def __init__(self, tracker: str) -> None:
        super().__init__(
            f"`train.tracker` = {tracker!r} needs the package {PACKAGES[tracker]}: pip install {PACKAGES[tracker]}, or "
            "set it to null."
        )


class TensorBoardLogger:
    """Event files that `tensorboard --logdir` shows.

    Args:
      directory: Of the event files.
      config: Plain configuration, shown as text.
    """

    def __init__(self, directory: Path, config: Mapping[str, Any]) -> None:
        self._module = _import("tensorboard")
        self._directory, self._config = directory, config

    def start(self, description: Mapping[str, Any], *, total_steps: int, step: int) -> None:
        """Opens the event file; after a resume, points from later steps are hidden."""
        del total_steps
        # Its own thread ends where the disk is full, and then nobody empties its queue: whoever fills that one must not
        # wait for room in it, nor the end of the process for what is left in it.
        self._writer = self._module.SummaryWriter(
            str(self._directory), purge_step=step + 1 if step else None, max_queue=0
        )
        self._writer.file_writer.event_writer._event_queue.cancel_join_thread()
        text = yaml.safe_dump(dict(description)) + yaml.safe_dump(dict(self._config), sort_keys=False)
        self._writer.add_text("config", code_block(text), step)

    def log(self, record: Mapping[str, Any], step: int) -> None:
        """Draws a curve for each name; a finding of the watch is a text."""
        if FOUND in record:
            self._writer.add_text(FOUND, for_markdown(say(record)), step)
            return
        for name, value in _curves(record).items():
            self._writer.add_scalar(name, value, step)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """A Markdown table."""
        lines = [[for_markdown(str(cell)) for cell in line] for line in (columns, *rows)]
        lines.insert(1, ["---"] * len(columns))
        self._writer.add_text(name, "\n".join(f"| {' | '.join(line)} |" for line in lines), step)

    def log_images(self, images: Mapping[str, np.ndarray], step: int) -> None:
        """Logs an image for each name."""
        for name, image in images.items():
            self._writer.add_image(name, image, step, dataformats="HWC")

    def flush(self) -> None:
        """Writes what is buffered."""
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()


class WandbLogger:
    """A Weights & Biases run; `WANDB_MODE=offline` keeps it on the disk, and so does a server that does not answer.

    A resumed run continues the same curve. Steps that it repeats are not drawn twice: wandb keeps the first
    ones.

    Args:
      directory: Of wandb's own files.
      config: Plain configuration, kept with the run.
      run_id_file: Remembers which run of wandb this folder is.
    """

    def __init__(self, directory: Path, config: Mapping[str, Any], *, run_id_file: Path) -> None:
        self._wandb = _import("wandb")
        self._directory, self._config, self._id_file = directory, config, run_id_file

    def start(self, description: Mapping[str, Any], *, total_steps: int, step: int) -> None:
        """Begins the run, or continues it after a resume."""
        del total_steps
        train = self._config["train"]
        resumed = step > 0 and self._id_file.exists()
        arguments = {
            "project": train["project_name"],
            "name": train["run_name"],
            "entity": train["entity_name"],
            "group": train["group_name"],
            "tags": train["tags"],
            "dir": str(self._directory),
            "config": {**self._config, "description": dict(description)},
            "id": self._id_file.read_text(encoding="utf-8").strip() if resumed else None,
            "resume": "allow" if resumed else None,
        }
        try:
            self._run = self._wandb.init(**arguments)
        except self._wandb.Error as error:
            self._run = self._wandb.init(**arguments, mode="offline")
            warnings.warn(
                f"wandb cannot be reached ({str(error).splitlines()[0]}): this run is kept under "
                f"{self._directory / 'wandb'}, and `wandb sync` sends it later.",
                stacklevel=5,
            )
        self._id_file.write_text(self._run.id, encoding="utf-8")

    def log(self, record: Mapping[str, Any], step: int) -> None:
        """Draws a curve for each name; a finding of the watch is an alert."""
        if FOUND in record:
            self._run.alert(title=record[FOUND], text=say(record), level="WARN")
            return
        self._run.log(_curves(record), step=step)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """A wandb table."""
        cells = [[for_terminal(str(cell)) for cell in row] for row in rows]
        self._run.log({name: self._wandb.Table(columns=list(columns), data=cells)}, step=step)

    def log_images(self, images: Mapping[str, np.ndarray], step: int) -> None:
        """Logs a panel for each part before a name's first slash, its images under the rest; "images" without one.

        A step has several: the samples', the evaluation's, and those of the user's hook.
        """
        panels: dict[str, list[Any]] = {}
        for name, image in images.items():
            panel, slash, rest = name.partition("/")
            key, caption = (panel, rest) if slash else ("images", name)
            panels.setdefault(key, []).append(self._wandb.Image(image, caption=caption))
        self._run.log(panels, step=step)

    def flush(self) -> None:
        """Nothing to do: wandb's own process writes as it goes."""

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()


def _curves(record: Mapping[str, Any]) -> dict[str, float]:
    """Curves of a record: everything but its counters, and how it sampled."""
    prefix = "eval/" if "evaluation" in record else ""
    shown = (name for name in record if name not in COUNTERS and not name.startswith(SAMPLING))
    return {f"{prefix}{name}": record[name] for name in shown}


def check_tracker(tracker: str | None) -> None:
    """Checks that the tracker's package is there, without importing it: before a model is loaded and not after.

    Raises:
      MissingTrackerError: If it is not.
    """
    if tracker is not None and not _is_installed(PACKAGES[tracker]):
        raise MissingTrackerError(tracker)


def _is_installed(package: str) -> bool:
    if package in sys.modules:  # None there is Python's way to forbid an import
        return sys.modules[package] is not None
    return importlib.util.find_spec(package) is not None


def _import(tracker: str) -> ModuleType:
    try:
        return importlib.import_module(PACKAGES[tracker])
    except ImportError as error:
        raise MissingTrackerError(tracker) from error
