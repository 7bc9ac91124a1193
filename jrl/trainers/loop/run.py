# SPDX-License-Identifier: Apache-2.0
"""The frame of an algorithm's loop: resuming, logging one step late, evaluation, checkpoints, orderly stops.

A trainer's `learn` is the algorithm; everything else that happens between two iterations happens in `Run.after`.
Intervals count optimizer steps. An iteration is atomic: what falls due inside it happens at its end. `total_steps` is
exact: the last iteration makes only the steps that are left.
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
import numpy as np

from jrl.device_memory import note_if_out_of_memory
from jrl.distributed import end_on_error, is_main, new_meeting, on_main
from jrl.learners.online_tokens import TokenFigures
from jrl.rollout.rewards import FAILURES
from jrl.trainers.cards.closing import Ending, closing_sentence, write_report
from jrl.trainers.checkpoints.checkpointer import Checkpointer
from jrl.trainers.checkpoints.cursor import check_data, make_cursor
from jrl.trainers.config.method import entry_of
from jrl.trainers.loggers.description import describe_end, describe_intervals
from jrl.trainers.loggers.jsonl import SAMPLES, SAMPLING
from jrl.trainers.loggers.loggers import Loggers, make_loggers
from jrl.trainers.loggers.standard_outputs import mute_lost
from jrl.trainers.loggers.watch import RULES, Watch
from jrl.trainers.loop.activity import Activity
from jrl.trainers.loop.metrics_queue import Pending, check_steps
from jrl.trainers.loop.peers import check_same, fail_together, say_end, start_vote
from jrl.trainers.loop.signals import GracefulStop
from jrl.trainers.loop.stopwatch import CompileCounter, Stopwatch
from jrl.trainers.rollouts.token_log import token_log
from jrl.typing import Metrics

if TYPE_CHECKING:
    from jrl.trainers.base import Trainer


_LAST_SAVE_SECONDS = 10
"""What a checkpoint in flight is given when a process ends without the others."""


class UnfinishedError(RuntimeError):
    """A function of the user's called `sys.exit` in the middle of a run."""


def run_length(
    num_steps: int,
    *,
    steps_per_iteration: int,
    max_iterations: int | None,
    step: int = 0,
    iteration: int = 0,
) -> tuple[int, int]:
    """Iterations and optimizer steps of a run at its end; the steps may end within the last iteration.

    Args:
      num_steps: Optimizer steps that are wanted in all.
      steps_per_iteration: Of a whole iteration.
      max_iterations: Iterations in all; None: the steps alone end the run.
      step: Optimizer steps so far.
      iteration: Iterations so far.
    """
    left = math.ceil(max(num_steps - step, 0) / steps_per_iteration)
    if max_iterations is not None:
        left = min(left, max(max_iterations - iteration, 0))
    return iteration + left, max(min(step + left * steps_per_iteration, num_steps), step)


def ends_within_iteration(num_steps: int, *, steps_per_iteration: int, max_iterations: int | None) -> bool:
    """True where a run's last iteration is cut: its update is then told of the last step. As `run_length`."""
    _, end = run_length(num_steps, steps_per_iteration=steps_per_iteration, max_iterations=max_iterations)
    return end % steps_per_iteration > 0


class Run:
    """A call of `learn`: a context manager around the loop.

    Args:
      trainer: Whose state is trained.
      num_steps: Optimizer steps in all, those before a resume included; the last iteration makes what is left of them.
      steps_per_iteration: Optimizer steps of every other iteration.
      max_iterations: Iterations in all; None: the steps alone end the run.

    Attributes:
      step: Optimizer steps so far.
      last_step: Those at the end.
      iteration: Iterations so far.
      num_iterations: Those at the end.
      history: The trainer's: training records and evaluations, those before a resume included.
      interrupted: Whether the loop ended early because the process was asked to stop.
      unsaved: Whether the run ended without its last checkpoint, because the disk refused it.
      end_of_state: The state's counter after the last step, where the last iteration makes fewer steps than the others:
        a figure that the update takes, so that it is compiled once. None: every iteration is whole.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        num_steps: int,
        steps_per_iteration: int = 1,
        max_iterations: int | None = None,
    ) -> None:
        self.trainer, self.config = trainer, trainer.config.train
        self.steps_per_iteration = steps_per_iteration
        self._num_steps, self._max_iterations = num_steps, max_iterations
        self.step = self.iteration = 0
        self.history: list[dict[str, Any]] = trainer.history
        self.interrupted = self.unsaved = False
        self.end_of_state: np.int32 | None = None
        self._measure()
        self.num_evaluations = 0
        self.best_score: float | None = None
        self._evaluation_due = False  # until it is logged: a run that fails before then makes up for it
        self.stopwatch = Stopwatch()
        self._saved_step = -1
        self._agreed_to_stop = False
        self._pending: Pending | None = None
        self._iteration_began = self._began = time.perf_counter()

    def _measure(self) -> None:
        """Sets where the run ends, from where it stands."""
        self.num_iterations, self.last_step = run_length(
            self._num_steps,
            steps_per_iteration=self.steps_per_iteration,
            max_iterations=self._max_iterations,
            step=self.step,
            iteration=self.iteration,
        )

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
            check_same(self.trainer.config.to_dict(), self._data_sha256, self._num_steps)
            records = self._restore()
            self._first_step = self.step
            self._measure()
            if (self.last_step - self.step) % self.steps_per_iteration:
                made = int(jax.device_get(self.trainer.optimizer_steps()))
                self.end_of_state = np.int32(made + self.last_step - self.step)
            self.checkpoints.take_over()
            self.loggers = Loggers(None, [])
            self.history[:] = on_main(partial(self._open_loggers, records, opened))
            self._watch = Watch(self.history, RULES if self.config.watch else ())
            self._meeting = new_meeting()
            self._opened = opened.pop_all()
        return self

    def _open_loggers(self, keep_records: int | None, opened: ExitStack) -> list[Any]:
        """Opens the run's loggers on process 0, which alone writes; returns the records from before."""
        self.loggers = make_loggers(self.trainer.config, self.trainer.run_dir, keep_records=keep_records)
        opened.callback(self.loggers.close)
        description = self.trainer.description()
        self._activity = Activity(self.stopwatch, self.compilations, str(description.get("model")))
        opened.callback(self._activity.keep)
        for live in self.loggers.live:
            live.follow(self._activity.now)
        if jax.process_count() > 1:
            description["processes"] = f"{jax.process_count()}; if one is lost, all end"
            description["afterwards"] = f"train.resume_from_checkpoint: {self.checkpoints.run_dir}"
        description |= describe_end(self.last_step, total_steps=self.config.total_steps, epochs=self._epochs)
        description |= describe_intervals(
            self.step,
            self.last_step,
            iteration=self.steps_per_iteration,
            evaluation=self.config.eval_interval,
            checkpoint=self.config.checkpoint_interval,
        )
        self.loggers.start(description, total_steps=self.last_step, step=self.step)
        return list(self.loggers.kept_records)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Saves what a failure left whole, waits for checkpoints in flight, closes everything.

        Before the first step there is nothing to save, and a checkpoint would only stand in the next try's way. Of
        several processes none can save alone: where they do not fail together, they end with the last checkpoint.
        """
        failure = self._unfinished(error) if isinstance(error, SystemExit) else error
        self.interrupted = error is None and self.stopped
        with self._opened:
            saved = False
            try:
                if failure is None or self._can_save(failure):
                    self._end(check=failure is None)
                    saved = True
            except BaseException as another:
                failure = another
            if failure is None:
                self._say_how_it_ended()
            else:
                note_if_out_of_memory(failure)
            if failure is not None and not saved and jax.process_count() > 1:
                self.checkpoints.abandon(seconds=_LAST_SAVE_SECONDS)
                say_end(failure, self.checkpoints.run_dir)
            if failure is not None and failure is not error:
                raise failure

    def _say_how_it_ended(self) -> None:
        """Writes the report, and says what happened, where things are, and what to do next."""
        if not is_main():
            return
        entry = entry_of(self.trainer.config.method)
        ending = Ending(
            run_dir=self.checkpoints.run_dir,
            first_step=self._first_step,
            step=self.step,
            last_step=self.last_step,
            total_steps=self.config.total_steps,
            epochs=self._epochs,
            is_over=self.iteration >= self.num_iterations,
            unsaved=self.unsaved,
            seconds=time.perf_counter() - self._began,
            writes_text=entry is not None and entry.model == "language",
            resume_argument=self.trainer.resume_argument,
            report=write_report(self.checkpoints.run_dir),
        )
        sentence = closing_sentence(self.history, ending)
        for live in self.loggers.live:
            live.finish(sentence)

    @property
    def _epochs(self) -> str:
        """`train.epochs` in words."""
        count = self.config.epochs
        one, several = ("pass", "passes") if self.trainer.epoch == "pass" else ("iteration", "iterations")
        return f"{count:,} {one if count == 1 else several}"

    def _unfinished(self, error: SystemExit) -> UnfinishedError:
        """Error in place of a `sys.exit` in the middle of a run, whose status would say that the run is done."""
        found = UnfinishedError(
            f"The run ended at step {self.step} of {self.last_step}: a function that it called, a callback perhaps, "
            f"called sys.exit({error.code!r}). To end a run in order, send it SIGTERM."
        )
        found.__cause__ = error
        return found

    def _can_save(self, error: BaseException) -> bool:
        """True where a run that fails is to be saved, and can be."""
        return isinstance(error, FAILURES) and fail_together(error, f"{self._meeting}_{self.step}")

    def _keep_folder(self, *, together: bool = True) -> None:
        """Notices a folder that was deleted or renamed, before anything more is written there."""
        mute_lost()
        before = self.checkpoints.run_dir
        try:
            self.checkpoints.keep_folder(together=together)
        finally:
            if self.checkpoints.run_dir != before:
                self.loggers.move(self.checkpoints.run_dir)
        self.loggers.keep()

    def _end(self, *, check: bool) -> None:
        """Logs and saves what is not yet, and waits for it."""
        try:
            try:
                self._keep_folder()
            finally:
                self.flush(check=check)
        finally:
            unsaved = self.step > 0 and self._saved_step != self.step
            if unsaved and not self.trainer.state_is_deleted():
                self.save()
            self.checkpoints.wait()
            self.unsaved = self.checkpoints.last_failed

    def begin(self) -> None:
        """Evaluates before the first step; a resumed run makes up for the evaluation that ended the one before it."""
        if self.iteration == 0:
            self.evaluate()
        elif self._evaluation_due:
            self.evaluate()
            self.save()

    def remaining(self) -> Iterator[int]:
        """Numbers of the iterations still to do; ends early when the process is asked to stop."""
        self._iteration_began = time.perf_counter()
        while self.iteration < self.num_iterations and not self.stopped:
            yield self.iteration

    def end_here(self) -> None:
        """Makes the iteration in progress the last one; called before its `after`."""
        self.num_iterations = self.iteration + 1

    def end_before(self) -> None:
        """Makes the iteration before the next one the last: there is nothing left to do."""
        self.num_iterations = self.iteration

    @property
    def stopped(self) -> bool:
        """True where a signal asked for an orderly stop, or whoever watches did.

        Several processes stop together, an iteration after the first of them was asked: then all know of it.
        """
        return self._asked() if jax.process_count() == 1 else self._agreed_to_stop

    def _asked(self) -> bool:
        """True where this process was asked to stop."""
        return self._stop.requested or self.trainer.hooks.stop()

    def after(
        self,
        host: dict[str, float],
        device: Metrics,
        rows: list[dict[str, Any]] | None = None,
        tokens: TokenFigures | None = None,
    ) -> None:
        """Ends an iteration: logs it (its device metrics one iteration late), evaluates and saves where due.

        Args:
          host: Figures known on the host.
          device: Metrics of the update, still being computed.
          rows: Samples to show and to keep.
          tokens: Figures of the tokens of some of them, still being computed.
        """
        before = self.step
        # First: the state has taken this step, and is saved with its number though logging the last one may fail.
        self.iteration += 1
        self.step = min(self.step + self.steps_per_iteration, self.last_step)
        last = self.iteration == self.num_iterations
        evaluates = last or self._due(self.config.eval_interval, before)
        self._evaluation_due = evaluates
        asks = self._asked() or self.checkpoints.displaced is not None
        vote = start_vote(self.trainer.mesh, asks) if jax.process_count() > 1 else None
        try:
            self.flush()
        finally:
            self._pending = Pending(self.step, self.iteration, host, device, tokens, vote)
            if rows is not None:
                self.loggers.log_samples(rows, self.step, show=evaluates)
        self._keep_folder(together=False)
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
        self._evaluation_due = False
        if found is None:
            return False
        record = {"step": self.step, "evaluation": self.num_evaluations, **found.metrics}
        self.num_evaluations += 1
        full = record | {f"{SAMPLING}{name}": value for name, value in (found.sampling or {}).items()}
        self._log_watched(full, self.step)
        self.loggers.log_table(SAMPLES, found.columns, found.rows, self.step)
        improved = self._improves(found.score)
        self.best_score = found.score if improved else self.best_score
        self.trainer.hooks.evaluate(record)
        return improved

    def _improves(self, score: float | None) -> bool:
        """True where a score is the best so far."""
        if score is None or not math.isfinite(score) or self.step == 0:
            return False
        return self.best_score is None or score > self.best_score

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
        self._log_watched(record, pending.step)
        if pending.tokens is not None:
            self.loggers.log_tokens(token_log(pending.tokens, self.trainer.tokenizer), pending.step)
        self.trainer.hooks.log(record)
        if check:
            check_steps(record, self.config.max_bad_steps)

    def _log_watched(self, record: dict[str, Any], step: int) -> None:
        """Logs a record, and what the watch finds in it."""
        for entry in (record, *(found.record() for found in self._watch.see(record))):
            self.history.append(entry)
            self.loggers.log(entry, step)

    def save(self) -> None:
        """Starts writing a checkpoint of the state as it is now; its callers have flushed the metrics."""
        self._keep_folder()
        self.loggers.flush()
        self.checkpoints.save(
            self.step,
            self.trainer.kept_arrays if self.config.save_optimizer else None,
            write_model=self.trainer.export_writer(data_sha256=self._data_sha256),
            config=self.trainer.config.to_dict(),
            cursor=make_cursor(
                self.trainer,
                iteration=self.iteration,
                evaluations=self.num_evaluations,
                evaluation_due=self._evaluation_due,
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
            self.trainer.kept_arrays,
            config=self.trainer.config.to_dict(),
            frozen_sha256=self.trainer.frozen_sha256,
        )
        if found is None:
            return None
        cursor = found.cursor
        check_data(cursor["data_sha256"], self._data_sha256, found.path)
        self.trainer.restore(found.state, cursor["host_state"])
        self.iteration, self.num_evaluations = cursor["iteration"], cursor["evaluations"]
        self.step = int(jax.device_get(self.trainer.optimizer_steps()))  # an iteration may have ended inside
        self.best_score = cursor["best_score"]
        self._evaluation_due = cursor.get("evaluation_due", False)  # older checkpoints do not say
        self._saved_step = self.step
        return int(cursor["records"])

    def _due(self, interval: int, before: int) -> bool:
        """True where a multiple of `interval` lies in (before, step]."""
        return interval > 0 and before // interval != self.step // interval
