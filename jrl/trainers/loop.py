# SPDX-License-Identifier: Apache-2.0
"""What surrounds an algorithm's loop: resuming, logging one step late, evaluation, checkpoints, orderly stops.

A trainer's `learn` is the algorithm; everything else that happens between two iterations happens in `Run.after`.
Intervals count optimizer steps. An iteration is atomic: what falls due inside it happens at its end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import jax

from jrl.distributed import end_on_error, new_meeting, on_main
from jrl.trainers.checkpoint import Checkpointer
from jrl.trainers.cursor import check_data, make_cursor
from jrl.trainers.loggers import Loggers, make_loggers
from jrl.trainers.loggers_jsonl import SAMPLES, SAMPLING
from jrl.trainers.peers import check_same, fail_together, say_end, start_vote
from jrl.trainers.pending import Pending, check_steps
from jrl.trainers.signals import GracefulStop
from jrl.trainers.timing import CompileCounter, Stopwatch
from jrl.typing import Metrics

if TYPE_CHECKING:
    from jrl.trainers.base import Trainer


_LAST_SAVE_SECONDS = 10
"""What a checkpoint in flight is given when a process ends without the others."""


class Run:
    """One call of `learn`: a context manager around the loop.

    Args:
      trainer: Whose state is trained.
      steps_per_iteration: Optimizer steps of one iteration.
      num_iterations: Iterations in all, those before a resume included.
    """

    def __init__(self, trainer: Trainer, *, steps_per_iteration: int, num_iterations: int) -> None:
        self.trainer, self.config = trainer, trainer.config.train
        self.steps_per_iteration, self.num_iterations = steps_per_iteration, num_iterations
        self.iteration = 0
        self.num_evaluations = 0
        self.best_score: float | None = None
        self.stopwatch = Stopwatch()
        self._saved_step = -1
        self._agreed_to_stop = False
        self._pending: Pending | None = None
        self._iteration_began = time.perf_counter()

    @property
    def step(self) -> int:
        """Optimizer steps so far."""
        return self.iteration * self.steps_per_iteration

    @property
    def last_step(self) -> int:
        """`total_steps`, rounded up to whole iterations."""
        return self.num_iterations * self.steps_per_iteration

    def __enter__(self) -> Self:
        """Locks the run's folder, restores a checkpoint where one is named, opens the trackers."""
        if jax.process_count() > 1:
            end_on_error()
        with ExitStack() as opened:  # what fails half-way leaves neither lock nor signal handler behind
            self.compilations = opened.enter_context(CompileCounter())
            self._stop = opened.enter_context(GracefulStop())
            self.checkpoints = Checkpointer(
                self.trainer.run_dir,
                keep=self.config.keep_checkpoints,
                overwrite=self.config.overwrite,
                resume_from=self.config.resume_from_checkpoint,
            )
            opened.callback(self.checkpoints.close)
            self._data_sha256 = self.trainer.data_sha256()  # once: every checkpoint writes it
            check_same(self.trainer.config.to_dict(), self._data_sha256, self.num_iterations)
            records = self._restore()
            self.checkpoints.take_over()
            self.loggers = Loggers(None, [])
            self.trainer.history = on_main(partial(self._open_loggers, records, opened))
            self._meeting = new_meeting()
            self._opened = opened.pop_all()
        return self

    def _open_loggers(self, keep_records: int | None, opened: ExitStack) -> list[Any]:
        """On process 0, which alone writes: opens what the run is told to; the records from before."""
        self.loggers = make_loggers(self.trainer.config, self.trainer.run_dir, keep_records=keep_records)
        opened.callback(self.loggers.close)
        description = self.trainer.description()
        if jax.process_count() > 1:
            description["processes"] = f"{jax.process_count()}; if one is lost, all end"
            description["afterwards"] = f"train.resume_from_checkpoint: {self.checkpoints.run_dir}"
        self.loggers.start(description, total_steps=self.last_step, step=self.step)
        return list(self.loggers.kept_records)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Saves what a failure left whole, waits for checkpoints in flight, closes everything.

        Before the first step there is nothing to save, and a checkpoint would only stand in the next try's way. Of
        several processes none can save alone: where they do not fail together, they end with the last checkpoint.
        """
        with self._opened:
            try:
                if error is None or self._can_save(error):
                    self._end(check=error is None)
                    return
                failure = error
            except BaseException as another:
                failure = another
            if jax.process_count() > 1:
                self.checkpoints.abandon(seconds=_LAST_SAVE_SECONDS)
                say_end(failure, self.checkpoints.run_dir)
            if failure is not error:
                raise failure

    def _can_save(self, error: BaseException) -> bool:
        """Whether a run that fails is to be saved, and can be."""
        return isinstance(error, Exception) and fail_together(error, f"{self._meeting}_{self.step}")

    def _end(self, *, check: bool) -> None:
        """Logs and saves what is not yet, and waits for it."""
        try:
            self.flush(check=check)
        finally:
            unsaved = self.step > 0 and self._saved_step != self.step
            if unsaved and not self.trainer.state_is_deleted():
                self.save()
            self.checkpoints.wait()
            self.trainer.unsaved = self.checkpoints.last_failed

    def remaining(self) -> Iterator[int]:
        """Numbers of the iterations still to do; ends early when the process is asked to stop."""
        self._iteration_began = time.perf_counter()
        while self.iteration < self.num_iterations and not self.stopped:
            yield self.iteration

    def end_here(self) -> None:
        """Makes the iteration in progress the last one; called before its `after`."""
        self.num_iterations = self.iteration + 1

    @property
    def stopped(self) -> bool:
        """Whether SIGINT or SIGTERM asked for an orderly stop, or whoever watches did.

        Several processes stop together, an iteration after the first of them was asked: then all know of it.
        """
        return self._asked() if jax.process_count() == 1 else self._agreed_to_stop

    def _asked(self) -> bool:
        """Whether this process was asked to stop."""
        return self._stop.requested or self.trainer.hooks.stop()

    def after(
        self, host: dict[str, float], device: Metrics, rows: list[dict[str, Any]] | None = None
    ) -> None:
        """Ends an iteration: logs it (its device metrics one iteration late), evaluates and saves where due.

        Args:
          host: Figures known on the host.
          device: Metrics of the update, still being computed.
          rows: Samples to show and to keep.
        """
        before = self.step
        # First: the state has taken this step, and is saved with its number though logging the last one may fail.
        self.iteration += 1
        vote = start_vote(self.trainer.mesh, self._asked()) if jax.process_count() > 1 else None
        try:
            self.flush()
        finally:
            self._pending = Pending(self.step, self.iteration, host, device, vote)
        last = self.iteration == self.num_iterations
        evaluates = last or self._due(self.config.eval_interval, before)
        if rows is not None:
            self.loggers.log_samples(rows, self.step, show=evaluates)
        improved = evaluates and self.evaluate()
        save_best = improved and self.config.save_best
        if last or save_best or self.stopped or self._due(self.config.checkpoint_interval, before):
            self.flush()  # a divergence must be noticed before it is saved as if nothing were wrong
            self.save()

    def evaluate(self) -> bool:
        """Evaluates and logs; whether its score is the best so far (the untrained policy does not count)."""
        self.flush()
        with self.stopwatch("evaluation"):
            found = self.trainer.run_evaluation(self.step)
        if found is None:
            return False
        record = {"step": self.step, "evaluation": self.num_evaluations, **found.metrics}
        self.num_evaluations += 1
        full = record | {f"{SAMPLING}{name}": value for name, value in (found.sampling or {}).items()}
        self.trainer.history.append(full)
        self.loggers.log(full, self.step)
        self.loggers.log_table(SAMPLES, found.columns, found.rows, self.step)
        self.trainer.hooks.evaluate(record)
        score = found.score
        if score is None or not math.isfinite(score) or self.step == 0:
            return False
        if self.best_score is not None and score <= self.best_score:
            return False
        self.best_score = score
        return True

    def flush(self, *, check: bool = True) -> None:
        """Fetches and logs the metrics of the last update; waits for it where it is still running."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        jax.block_until_ready(pending.device)  # first: what the host did meanwhile is in the stopwatch
        record = pending.record(
            self.stopwatch.take(), began=self._iteration_began, compilations=self.compilations.count
        )
        self._iteration_began = time.perf_counter()
        self._agreed_to_stop |= pending.is_stop()
        self.trainer.history.append(record)
        self.loggers.log(record, pending.step)
        self.trainer.hooks.log(record)
        if check:
            check_steps(record, self.config.max_bad_steps)

    def save(self) -> None:
        """Starts writing a checkpoint of the state as it is now; its callers have flushed the metrics."""
        self.loggers.flush()
        self.checkpoints.save(
            self.step,
            self.trainer.state if self.config.save_optimizer else None,
            write_model=self.trainer.export_writer(data_sha256=self._data_sha256),
            config=self.trainer.config.to_dict(),
            cursor=make_cursor(
                self.trainer,
                iteration=self.iteration,
                steps_per_iteration=self.steps_per_iteration,
                evaluations=self.num_evaluations,
                best_score=self.best_score,
                data_sha256=self._data_sha256,
            ),
            best_score=self.best_score,
        )
        self._saved_step = self.step
        self.trainer.hooks.save(self.checkpoints.path(self.step))

    def _restore(self) -> int | None:
        """Puts a checkpoint's state into the trainer; the number of history records it knew of, None on a fresh run."""
        found = self.checkpoints.restore(
            self.trainer.state,
            config=self.trainer.config.to_dict(),
            frozen_sha256=self.trainer.frozen_sha256,
        )
        if found is None:
            return None
        cursor = found.cursor
        check_data(cursor["data_sha256"], self._data_sha256, found.path)
        self.trainer.state = found.state
        self.trainer.load_host_state(cursor["host_state"])
        self.iteration, self.num_evaluations = cursor["iteration"], cursor["evaluations"]
        self.best_score = cursor["best_score"]
        self._saved_step = self.step
        return int(cursor["records"])

    def _due(self, interval: int, before: int) -> bool:
        """Whether a multiple of `interval` lies in (before, step]."""
        return interval > 0 and before // interval != self.step // interval
