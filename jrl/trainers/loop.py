# SPDX-License-Identifier: Apache-2.0
"""What surrounds an algorithm's loop: resuming, logging one step late, evaluation, checkpoints, orderly stops.

A trainer's `learn` is the algorithm; everything else that happens between two iterations happens in `Run.after`.
Intervals count optimizer steps. An iteration is atomic: what falls due inside it happens at its end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import jax

from jrl.ops.metrics import finalize
from jrl.trainers.checkpoint import Checkpointer
from jrl.trainers.loggers import make_loggers
from jrl.trainers.loggers_jsonl import SAMPLES
from jrl.trainers.manifest import CheckpointError
from jrl.trainers.signals import GracefulStop
from jrl.trainers.timing import CompileCounter, Stopwatch
from jrl.typing import Metrics

if TYPE_CHECKING:
    from jrl.trainers.base import Trainer


TOKENS = ("completion/tokens", "sft/tokens", "ilql/tokens", "dpo/tokens", "reward_model/tokens")
"""What `perf/tokens_per_second` counts: the first of these that an iteration reports."""


class TrainingDivergedError(RuntimeError):
    """Too many non-finite optimizer steps in a row."""


def make_cursor(
    trainer: Trainer,
    *,
    iteration: int,
    steps_per_iteration: int,
    evaluations: int,
    best_score: float | None,
    data_sha256: Mapping[str, str],
) -> dict[str, Any]:
    """What a checkpoint holds beside the state: where the run stands, plain JSON.

    Args:
      trainer: Whose run it is.
      iteration: Iterations so far.
      steps_per_iteration: Optimizer steps of one.
      evaluations: Evaluations so far.
      best_score: The best of them; None: none counted.
      data_sha256: Fingerprints of the data, as `Trainer.data_sha256` gives them.
    """
    return {
        "iteration": iteration,
        "steps_per_iteration": steps_per_iteration,
        "records": len(trainer.history),
        "evaluations": evaluations,
        "best_score": best_score,
        "frozen_sha256": trainer.frozen_sha256(),
        "data_sha256": dict(data_sha256),
        "host_state": trainer.host_state(),
    }


@dataclass
class Pending:
    """Metrics of an update that is still on the device."""

    step: int
    iteration: int
    host: dict[str, float]
    device: Metrics
    dispatched: float


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
            records = self._restore()
            self.checkpoints.take_over()
            self.loggers = make_loggers(self.trainer.config, self.trainer.run_dir, keep_records=records)
            opened.callback(self.loggers.close)
            self.trainer.history = list(self.loggers.kept_records)
            self.loggers.start(self.trainer.description(), total_steps=self.last_step, step=self.step)
            self._opened = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Saves what a failure left whole, waits for checkpoints in flight, closes everything.

        Before the first step there is nothing to save, and a checkpoint would only stand in the next try's way.
        """
        with self._opened:
            if kind is None or issubclass(kind, Exception):
                try:
                    self.flush(check=kind is None)
                finally:
                    unsaved = self.step > 0 and self._saved_step != self.step
                    if unsaved and not self.trainer.state_is_deleted():
                        self.save()

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
        """Whether SIGINT or SIGTERM asked for an orderly stop, or whoever watches did."""
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
        try:
            self.flush()
        finally:
            self._pending = Pending(self.step, self.iteration, host, device, time.perf_counter())
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
        self.trainer.history.append(record)
        self.loggers.log(record, self.step)
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
        metrics = finalize(jax.device_get(pending.device))
        now = time.perf_counter()
        times = self.stopwatch.take() | {"time/update": now - pending.dispatched}
        tokens = next((pending.host[name] for name in TOKENS if name in pending.host), 0.0)
        elapsed, self._iteration_began = now - self._iteration_began, now
        record = {
            "step": pending.step,
            "iteration": pending.iteration,
            **pending.host,
            **metrics,
            **times,
            "time/iteration": elapsed,
            "perf/tokens_per_second": tokens / elapsed,
            "perf/compilations": self.compilations.count,
        }
        self.trainer.history.append(record)
        self.loggers.log(record, pending.step)
        self.trainer.hooks.log(record)
        bad = metrics.get("optim/skipped_in_a_row", 0.0)
        if check and bad >= self.config.max_bad_steps:
            raise TrainingDivergedError(
                f"{int(bad)} optimizer steps in a row had a non-finite loss or gradient (`train.max_bad_steps` is "
                f"{self.config.max_bad_steps}); the parameters are those of the last finite step. Likely causes: a "
                "learning rate too high, rewards of extreme size, or a compute dtype too narrow."
            )

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
        cursor, data = found.cursor, self._data_sha256
        changed = [name for name in data if cursor["data_sha256"].get(name) != data[name]]
        if changed:
            raise CheckpointError(
                f"{found.path} was trained with others: {', '.join(f'`{name}`' for name in sorted(changed))} "
                "(of data its content or order, of a model its architecture or adapter). Give the same, or start a new "
                "run in another `train.checkpoint_dir`."
            )
        self.trainer.state = found.state
        self.trainer.load_host_state(cursor["host_state"])
        self.iteration, self.num_evaluations = cursor["iteration"], cursor["evaluations"]
        self.best_score = cursor["best_score"]
        self._saved_step = self.step
        return int(cursor["records"])

    def _due(self, interval: int, before: int) -> bool:
        """Whether a multiple of `interval` lies in (before, step]."""
        return interval > 0 and before // interval != self.step // interval
