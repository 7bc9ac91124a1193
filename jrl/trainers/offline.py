# SPDX-License-Identifier: Apache-2.0
"""Base of trainers that learn from samples which are there before the run: an optimizer step an iteration."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Protocol

import jax
from jax.sharding import Mesh

from jrl.compilation import COMPILER_OPTIONS
from jrl.data.sources.streams import StreamSet
from jrl.learners.accumulate import Loss
from jrl.mesh import replicated
from jrl.ops.metrics import finalize, merge_metrics
from jrl.placement import place_rows
from jrl.trainers.base import TRAINING_STREAM, Trainer
from jrl.trainers.loggers.description import Sized, describe_size, warn_of_batches
from jrl.trainers.rollouts.evaluation import Evaluation
from jrl.trainers.rollouts.rehearsal import Rehearsal, rehearsed
from jrl.typing import ComparisonBatch, Frozen, Metrics, Params

HELD_OUT = "eval/"
"""Before the name of a metric that was measured on the evaluation samples."""


class SampleSet(Sized, Protocol):
    """Tokenised samples and their batches."""

    def sha256(self) -> str:
        """Fingerprint of content and order."""
        ...

    def batch(self, step: int, batch_size: int) -> Any:
        """NumPy rows of optimizer step `step`, a pure function of its arguments: every sample once a pass, and what
        fills the last batch of a pass up is marked so that it weighs nothing."""
        ...


class OfflineTrainer(Trainer):
    """Passes over a set of samples.

    Attributes:
      samples: Set by `add_data`.
      eval_samples: What evaluations measure the objective on; None: nothing.
    """

    samples: SampleSet
    eval_samples: SampleSet | None = None
    tokens_metric: ClassVar[str]
    """Name under which a record counts the trained tokens."""
    loss_metric: ClassVar[str]
    """Name of the objective's loss among the metrics; on the evaluation samples, less of it is better."""

    @property
    def own_objective(self) -> Callable[[Params, Frozen, Any], Loss] | None:
        """Objective in place of the configured one; None: that one. It is never given padding."""
        return None

    def compile_evaluation(self, objective: Callable[[Params, Frozen, Any], Loss]) -> None:
        """Makes what evaluations call.

        Args:
          objective: `(params, frozen, batch) -> (loss_sum, weight, metrics)` of rows as `batch` gives them.
        """
        self._measure = measuring_program(objective, self.mesh)

    def learn(self) -> None:
        """Runs up to `total_steps`, or `epochs` passes over the samples."""
        root_key = jax.random.fold_in(self.root_key, TRAINING_STREAM)
        batch_size = self.config.train.batch_size
        with self.running(num_steps=self.num_steps) as run:
            run.begin()
            for iteration in run.remaining():
                with run.stopwatch("data"):
                    batch = self.samples.batch(iteration, batch_size)
                    rows = self.place(batch)
                key = jax.random.fold_in(root_key, iteration)
                self.state, metrics = self.update(self.state, self.frozen, rows, key)
                run.after({self.tokens_metric: self.count_tokens(batch)}, metrics)

    def rehearse(self) -> Rehearsal:
        """Learns from the first batch."""
        batch = self.samples.batch(0, self.config.train.batch_size)
        with jax.set_mesh(self.mesh):
            rows = self.place(batch)
            self.state, metrics = self.update(self.state, self.frozen, rows, self.root_key)
            return rehearsed(batch, metrics, host={self.tokens_metric: self.count_tokens(batch)})

    def place(self, batch: Any) -> Any:
        """Host rows on the mesh, as the update takes them."""
        return place_rows(self.mesh, batch if self.own_objective is None else real_rows(batch))

    def count_tokens(self, batch: Any) -> float:
        """Trained tokens of a batch."""
        return float(batch.mask.sum())

    @property
    def num_steps(self) -> int:
        """`total_steps`, or what `epochs` passes take if that is less; a stream has no length, so `total_steps`."""
        if isinstance(self.samples, StreamSet):
            return self.config.train.total_steps
        passes = math.ceil(len(self.samples) / self.config.train.batch_size)
        return min(self.config.train.total_steps, self.config.train.epochs * passes)

    def run_evaluation(self, step: int) -> Evaluation | None:
        """The objective's metrics on the evaluation samples, under `eval/`, beside what else an evaluation finds."""
        found = super().run_evaluation(step)
        if self.eval_samples is None:
            return found
        metrics = self.measure_samples(self.eval_samples)
        held_out = {f"{HELD_OUT}{name}": value for name, value in metrics.items()}
        score = -held_out[f"{HELD_OUT}{self.loss_metric}"]
        if found is None:
            return Evaluation(held_out, score, [], [])
        score = score if found.score is None else found.score
        return replace(found, metrics=found.metrics | held_out, score=score)

    def measure_samples(self, samples: SampleSet) -> dict[str, float]:
        """The objective's metrics over all samples of a set, each counted once."""
        batch_size = self.config.train.batch_size
        total: Metrics | None = None
        with jax.set_mesh(self.mesh):
            for number in range(math.ceil(len(samples) / batch_size)):
                rows = self.place(samples.batch(number, batch_size))
                metrics = self._measure(self.params, self.frozen, rows)
                total = metrics if total is None else merge_metrics(total, metrics)
        return finalize(jax.device_get(total or {}))

    def describe_data(self) -> dict[str, str]:
        """Describes the samples."""
        found = {"samples": describe_size(self.samples)} if "samples" in vars(self) else {}
        if found and not isinstance(self.samples, StreamSet):
            found |= warn_of_batches(self.config.train.batch_size, len(self.samples), "the samples")
        if self.eval_samples is not None:
            found["evaluation samples"] = describe_size(self.eval_samples)
        return found

    def data_sha256(self) -> dict[str, str]:
        """The samples', beside what every trainer has."""
        found = super().data_sha256() | {"samples": self.samples.sha256()}
        return found if self.eval_samples is None else found | {"eval_samples": self.eval_samples.sha256()}


def measuring_program(objective: Callable[[Params, Frozen, Any], Loss], mesh: Mesh) -> Callable[..., Metrics]:
    """Metrics of an objective, jitted: `(params, frozen, batch) -> metrics`."""

    def measure(params: Params, frozen: Frozen, batch: Any) -> Metrics:
        return objective(params, frozen, batch)[2]

    return jax.jit(measure, out_shardings=replicated(mesh), compiler_options=COMPILER_OPTIONS)


def real_rows(batch: Any) -> Any:
    """The rows of a batch, NumPy arrays, without the copies that only fill it up."""
    real = batch.valid if isinstance(batch, ComparisonBatch) else batch.mask.any(axis=1)
    return jax.tree.map(lambda x: x[real], batch)
