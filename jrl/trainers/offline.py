# SPDX-License-Identifier: Apache-2.0
"""What trainers share that learn from samples which are there before the run: one optimizer step an iteration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import jax

from jrl.trainers.base import Trainer
from jrl.trainers.description import Sized, describe_size
from jrl.trainers.loop import Run
from jrl.trainers.policy_holder import TRAINING_STREAM
from jrl.trainers.setup import place_rows


class SampleSet(Sized, Protocol):
    """Tokenised samples and their batches."""

    def sha256(self) -> str:
        """Fingerprint of content and order."""
        ...

    def batch(self, step: int, batch_size: int) -> Any:
        """NumPy rows of optimizer step `step`, a pure function of its arguments; their `mask` marks what is learned."""
        ...


class OfflineTrainer(Trainer):
    """Passes over a set of samples.

    Attributes:
      samples: Set by `add_data`.
    """

    samples: SampleSet
    tokens_metric: ClassVar[str]
    """Name under which a record counts the trained tokens."""

    def add_default_eval_prompts(self, samples: Sequence[Any], eval_prompts: Sequence[Any] | None) -> None:
        """Sets what `evaluate` samples on: by default the BOS text, for seq2seq models the first samples' prompts."""
        if eval_prompts is None and self.lm.decoder_start_token_id is not None:
            eval_prompts = [sample[0] for sample in samples[: self.config.train.batch_size]]
        self.add_eval_prompts(self.default_prompts() if eval_prompts is None else eval_prompts)

    def learn(self) -> None:
        """Runs up to `total_steps`, or `epochs` passes over the samples."""
        root_key = jax.random.fold_in(self.root_key, TRAINING_STREAM)
        batch_size = self.config.train.batch_size
        with (
            jax.set_mesh(self.mesh),
            Run(self, steps_per_iteration=1, num_iterations=self.num_iterations) as run,
        ):
            if run.iteration == 0:
                run.evaluate()
            for iteration in run.remaining():
                with run.stopwatch("data"):
                    batch = self.samples.batch(iteration, batch_size)
                    rows = place_rows(self.mesh, batch)
                key = jax.random.fold_in(root_key, iteration)
                self.state, metrics = self.update(self.state, self.frozen, rows, key)
                run.after({self.tokens_metric: float(batch.mask.sum())}, metrics)
            self.interrupted = run.stopped

    @property
    def num_iterations(self) -> int:
        """`total_steps`, or what `epochs` passes take if that is less."""
        passes = math.ceil(len(self.samples) / self.config.train.batch_size)
        return min(self.config.train.total_steps, self.config.train.epochs * passes)

    def description(self) -> dict[str, Any]:
        """What a run prints at its start, with what became of samples that were too long."""
        return super().description() | {"samples": describe_size(self.samples)}

    def data_sha256(self) -> dict[str, str]:
        """The samples', beside what every trainer has."""
        return super().data_sha256() | {"samples": self.samples.sha256()}
