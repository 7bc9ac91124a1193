# SPDX-License-Identifier: Apache-2.0
"""Destinations of a run's figures and samples: the console, JSON lines on disk always, and a tracker by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jrl.trainers.checkpoints.resume import plain
from jrl.trainers.config.secrets import without_secrets
from jrl.trainers.config.trl_config import TRLConfig
from jrl.trainers.loggers.console import RichConsole
from jrl.trainers.loggers.guard import GuardedTracker
from jrl.trainers.loggers.jsonl import ROLLOUTS, TOKENS, JSONLLogger
from jrl.trainers.loggers.standard_outputs import mute_lost
from jrl.trainers.loggers.trackers import TensorBoardLogger, WandbLogger

Record = Mapping[str, Any]


class Logger(Protocol):
    """A destination of records."""

    def start(self, description: Mapping[str, Any], *, total_steps: int, step: int) -> None:
        """Called once, before the first record, with what runs and where it stands."""
        ...

    def log(self, record: Record, step: int) -> None:
        """Logs a training record or an evaluation: name → number."""
        ...

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Samples: one row each, texts and numbers."""
        ...

    def flush(self) -> None:
        """Brings everything so far to where a crash cannot lose it."""
        ...

    def close(self) -> None:
        """Ends the run."""
        ...


@runtime_checkable
class ImageLogger(Protocol):
    """A destination that shows images, as trackers do."""

    def log(self, record: Record, step: int) -> None:
        """Logs a record, as a `Logger` does."""
        ...

    def log_images(self, images: Mapping[str, np.ndarray], step: int) -> None:
        """Images: name → (Y X 3), 8 bits."""
        ...


@runtime_checkable
class LiveLogger(Protocol):
    """A destination that shows a run as it goes, as the console does."""

    def follow(self, now: Callable[[], str]) -> None:
        """Takes what says, at any time, what the run is doing."""
        ...

    def see_sample(self, row: Mapping[str, Any]) -> None:
        """Takes the last sample."""
        ...

    def finish(self, sentence: str) -> None:
        """Takes what is said last, once the run is over."""
        ...


class Loggers:
    """All destinations of a run behind one face.

    Args:
      samples: The JSON lines on the disk; told first. None: nobody is told, for another process writes.
      others: Console and trackers, told in this order.

    Attributes:
      kept_records: Records from before a resume, which `metrics.jsonl` still holds.
    """

    def __init__(self, samples: JSONLLogger | None, others: Sequence[Logger]) -> None:
        self._samples, self._others = samples, tuple(others)
        self.kept_records: tuple[Record, ...] = ()
        self._open = ExitStack()
        self._is_silent = False
        if samples is not None:
            self.kept_records = tuple(samples.kept)
            self._open.callback(samples.close)

    def start(self, description: Mapping[str, Any], *, total_steps: int, step: int) -> None:
        """Tells every destination what runs, to which step, and from which step on."""
        if self._samples is not None:
            self._samples.start(description, total_steps=total_steps, step=step)
        for logger in self._others:
            logger.start(description, total_steps=total_steps, step=step)
            self._open.callback(partial(self._try, logger.close))

    def log(self, record: Record, step: int) -> None:
        """Logs a record to every destination."""
        if self._samples is not None:
            self._samples.log(record, step)
        for logger in self._others:
            self._try(partial(logger.log, record, step))

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Logs a table to every destination."""
        if self._samples is not None:
            self._samples.log_table(name, columns, rows, step)
        for logger in self._others:
            self._try(partial(logger.log_table, name, columns, rows, step))

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int, *, show: bool) -> None:
        """Rollouts, one dictionary each: all of them to the JSON lines, and as a table wherever else if asked to.

        Args:
          rows: Alike in their keys.
          step: Optimizer step.
          show: Whether people should see them now; every iteration would be too often.
        """
        if not rows or self._samples is None:
            return
        for live in self.live:
            live.see_sample(rows[-1])
        columns = list(rows[0])
        self._samples.log_table(
            ROLLOUTS, columns, [[row[column] for column in columns] for row in rows], step
        )
        readable = [column for column in columns if column not in ("output_tokens", "turns")]
        cells = [[row[column] for column in readable] for row in rows]
        for logger in self._others if show else ():
            self._try(partial(logger.log_table, ROLLOUTS, readable, cells, step))

    def log_tokens(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Rollouts token by token, for the report: to the JSON lines alone.

        Args:
          rows: Alike in their keys.
          step: Optimizer step.
        """
        if rows and self._samples is not None:
            cells = [list(row.values()) for row in rows]
            self._samples.log_table(TOKENS, list(rows[0]), cells, step)

    def _try(self, work: Callable[[], None]) -> None:
        """An output that nobody reads any more, or whose disk is full, does not end a run."""
        try:
            work()
        except OSError as error:
            mute_lost()
            if not self._is_silent:
                warnings.warn(
                    f"The run's figures cannot be shown ({error}); metrics.jsonl has them.", stacklevel=4
                )
            self._is_silent = True

    def keep(self) -> None:
        """Puts back what of the JSON lines was deleted or renamed."""
        if self._samples is not None:
            self._samples.keep()

    def move(self, run_dir: Path) -> None:
        """Goes on with the JSON lines in another run's folder."""
        if self._samples is not None:
            self._samples.move(run_dir)

    @property
    def trackers(self) -> tuple[ImageLogger, ...]:
        """Trackers that show images; none where none was asked for."""
        return tuple(logger for logger in self._others if isinstance(logger, ImageLogger))

    @property
    def live(self) -> tuple[LiveLogger, ...]:
        """Destinations that show the run as it goes."""
        return tuple(logger for logger in self._others if isinstance(logger, LiveLogger))

    def flush(self) -> None:
        """Called before every checkpoint: what a checkpoint counts must be on the disk before it is."""
        if self._samples is not None:
            self._samples.flush()
        for logger in self._others:
            logger.flush()

    def close(self) -> None:
        """Ends those that were started, and the rest of them where one fails."""
        self._open.close()


def make_loggers(
    config: TRLConfig, run_dir: Path, *, keep_records: int | None, console: Logger | None = None
) -> Loggers:
    """The destinations that a configuration asks for.

    Args:
      config: Names the tracker and the folders.
      run_dir: The run's folder.
      keep_records: Records of `metrics.jsonl` that the checkpoint knew of; later ones are cut off, because
        the resumed run writes them again. None on a fresh run, which starts an empty file.
      console: Replaces the standard one.
    Raises:
      ImportError: If the tracker's package is not installed, naming the extra that brings it.
    """
    samples_dir = Path(config.train.rollout_logging_dir or run_dir / "rollouts")
    jsonl = JSONLLogger(run_dir / "metrics.jsonl", samples_dir, keep_records=keep_records)
    loggers: list[Logger] = [console or RichConsole()]
    tracker_dir = Path(config.train.logging_dir or run_dir)
    shown = without_secrets(plain(config.to_dict()))
    if config.train.tracker == "tensorboard":
        tensorboard = TensorBoardLogger(tracker_dir / "tensorboard", shown)
        loggers.append(GuardedTracker(tensorboard, "tensorboard"))
    elif config.train.tracker == "wandb":
        wandb = WandbLogger(tracker_dir, shown, run_id_file=run_dir / "wandb_id")
        loggers.append(GuardedTracker(wandb, "wandb"))
    return Loggers(jsonl, loggers)
