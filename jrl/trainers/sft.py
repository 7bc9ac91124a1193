# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning on strings, prompt-output pairs and dialogues."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jrl.data.dialogue import DialogueSet
from jrl.data.pairs import PairSet
from jrl.learners.sft import make_sft_update
from jrl.learners.state import TrainState, init_train_state
from jrl.trainers.base import TRAINING_STREAM, Trainer
from jrl.trainers.loop import Run
from jrl.trainers.registry import register_trainer
from jrl.trainers.setup import place_rows
from jrl.typing import Params


@register_trainer("SFTTrainer")
class SFTTrainer(Trainer):
    """Next-token training. `state` is a `TrainState`; one iteration is one optimizer step."""

    state: TrainState

    def build(self, params: Params, make_reference: Callable[[], Params]) -> None:
        """No reference is made: nothing is compared."""
        del make_reference
        train = self.config.train
        optimizer = self.make_optimizer()
        update = make_sft_update(
            self.policy,
            optimizer,
            batch_size=train.batch_size,
            minibatch_size=train.minibatch_size or train.batch_size,
            logprob_chunk_bytes=train.logprob_chunk_bytes,
        )
        self.compile_learner(lambda p: init_train_state(p, optimizer), update, params)

    def add_data(
        self,
        *,
        samples: Sequence[Any] | None,
        rewards: Sequence[float] | None,
        prompts: Sequence[Any] | None,
        eval_prompts: Sequence[Any] | None,
    ) -> None:
        """Takes samples. Evaluation starts from the BOS text (seq2seq: from samples' prompts) by default."""
        if samples is None or rewards is not None or prompts is not None:
            raise ValueError(
                "SFTTrainer learns from `samples`: give those, and neither `rewards` nor `prompts`."
            )
        self.add_samples(samples)
        if eval_prompts is None:
            pairs = self.lm.decoder_start_token_id is not None
            eval_prompts = (
                [sample[0] for sample in samples[: self.config.train.batch_size]] if pairs else None
            )
        self.add_eval_prompts(self.default_prompts() if eval_prompts is None else eval_prompts)

    def add_samples(self, samples: Sequence[Any]) -> None:
        """Sets what is learned: strings, [prompt, output] pairs, or longer dialogues; for seq2seq models, pairs."""
        train, start = self.config.train, self.lm.decoder_start_token_id
        options: dict[str, int] = {"max_length": train.seq_length, "seed": train.seed}
        self.samples: DialogueSet | PairSet
        if start is None:
            self.samples = DialogueSet(samples, self.tokenizer, **options)
        else:
            self.samples = PairSet(samples, self.tokenizer, decoder_start_token_id=start, **options)

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
                    sequences = place_rows(self.mesh, batch)
                key = jax.random.fold_in(root_key, iteration)
                self.state, metrics = self.update(self.state, self.frozen, sequences, key)
                run.after({"sft/tokens": float(batch.mask.sum())}, metrics)
            self.interrupted = run.stopped

    @property
    def num_iterations(self) -> int:
        """`total_steps`, or what `epochs` passes take if that is less."""
        passes = math.ceil(len(self.samples) / self.config.train.batch_size)
        return min(self.config.train.total_steps, self.config.train.epochs * passes)

    @property
    def params(self) -> Params:
        """Trainable parameters."""
        return self.state.params

    def description(self) -> dict[str, Any]:
        """What a run prints at its start, with what became of samples that were too long."""
        cut = f", {self.samples.num_truncated} cut" if self.samples.num_truncated else ""
        dropped = f", {self.samples.num_dropped} dropped" if self.samples.num_dropped else ""
        return super().description() | {"samples": f"{len(self.samples):,}{cut}{dropped}"}

    def data_sha256(self) -> dict[str, str]:
        """The samples', beside what every trainer has."""
        return super().data_sha256() | {"samples": self.samples.sha256()}

    def optimizer_steps(self) -> jax.Array:
        """The state's step counter."""
        return self.state.step
