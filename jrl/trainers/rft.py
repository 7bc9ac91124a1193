# SPDX-License-Identifier: Apache-2.0
"""Rejection fine-tuning: sample, score, keep the best of each prompt, learn them; with a rising bar, then anew."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jrl.data.demonstrations.completions import CompletionSet
from jrl.data.prompts import PromptSet
from jrl.data.selection import KeptSamples, rising_percentiles
from jrl.forward import Reader
from jrl.learners.rft import RFTConfig
from jrl.learners.sft import make_sft_update
from jrl.learners.state import TrainState, init_train_state
from jrl.placement import place_rows
from jrl.rollout.rewards import RewardError
from jrl.trainers.base import TRAINING_STREAM
from jrl.trainers.config.registry import register_trainer
from jrl.trainers.config.trl_config import TRLConfig
from jrl.trainers.loading.setup import PolicyBundle
from jrl.trainers.loggers.description import warn_of_batches
from jrl.trainers.loop.run import Run
from jrl.trainers.loop.stopwatch import Stopwatch
from jrl.trainers.plan.model_part import LanguageShapes, ModelShapes
from jrl.trainers.programs import (
    Program,
    evaluation_program,
    optimizer_of,
    sequence_shapes,
    update_program,
)
from jrl.trainers.rollouts.rehearsal import Rehearsal, rehearsed
from jrl.trainers.rollouts.rft_experience import RoundCollector
from jrl.trainers.sampling_trainer import SamplingTrainer
from jrl.typing import Params, PRNGKey, Sequences, Update

MAX_EMPTY_ROUNDS = 3
"""Rounds in a row without a single score after which a run stops."""


class News(NamedTuple):
    """News in the record of an optimizer step.

    Attributes:
      metrics: Figures of the pass that began with it, and of the round before.
      rows: The round's samples; None: there was no round.
    """

    metrics: dict[str, float]
    rows: list[dict[str, Any]] | None


@register_trainer("RFTTrainer")
class RFTTrainer(SamplingTrainer):
    """Rejection fine-tuning. `state` is a `TrainState`; one iteration is one optimizer step.

    A round samples every prompt; `n_improve_steps` passes over what it kept follow, each with a higher percentile.
    """

    state: TrainState
    refusal = "learns from its own samples"

    @property
    def method(self) -> RFTConfig:
        """The algorithm's section of the configuration."""
        return self.method_as(RFTConfig)

    def load_model(self) -> PolicyBundle:
        """The model, as every policy's.

        Raises:
          ValueError: If there is an environment.
        """
        if self.environment is not None:
            raise ValueError(
                "`environment` must not be given for RFTTrainer, which would learn what the environment wrote, too. "
                "`trainer.record_episodes` of another trainer records episodes; `SFTTrainer` clones the best of them."
            )
        return super().load_model()

    def build(self, params: Params, make_reference: Callable[[], Params]) -> None:
        """The update of supervised fine-tuning; no reference is made: nothing is compared."""
        del make_reference
        method, optimizer = self.method, self.make_optimizer()
        update = _make_update(self.config, method, self.reader, optimizer)
        self.compile_learner(lambda p: init_train_state(p, optimizer), update, params)
        self.percentiles = rising_percentiles(
            method.start_percentile, method.end_percentile, method.n_improve_steps
        )
        self.num_rounds, self.num_passes, self.num_steps_of_pass = 0, 0, 0
        self.kept: KeptSamples | None = None
        self.samples: CompletionSet | None = None

    @classmethod
    def programs(cls, config: TRLConfig, model: ModelShapes, mesh: Mesh) -> list[Program]:
        """The update of an optimizer batch, and a sampling call."""
        method, optimizer = config.method, optimizer_of(config)
        assert isinstance(method, RFTConfig), "the registry saw to it"
        assert isinstance(model, LanguageShapes), "the method saw to it"
        reader = Reader(model.policy, chunk_bytes=config.train.logprob_chunk_bytes)
        update = _make_update(config, method, reader, optimizer)
        init = partial(init_train_state, optimizer=optimizer)
        sequences = sequence_shapes(model, config.train.batch_size, config.train.seq_length)
        return [
            evaluation_program(config, model, mesh, num_rows=method.chunk_size),
            update_program(model, mesh, init, update, sequences),
        ]

    def add_prompt_set(
        self, prompts: PromptSet, reward_fn: Callable[..., Any] | Sequence[Callable[..., Any]]
    ) -> None:
        """Takes prompts that are tokenised already, and their reward function."""
        method = self.method
        self.prompts, self.reward_fn = prompts, reward_fn
        everything = np.arange(len(self.prompts))
        token_lists = self.prompts.rows(everything, width=self.prompts.width(everything)).token_lists
        numbers: dict[tuple[int, ...], int] = {}
        groups = [numbers.setdefault(tuple(tokens), len(numbers)) for tokens in token_lists]
        self.prompt_tokens = [list(tokens) for tokens in numbers]
        self.collect = RoundCollector(
            self.collector(self.eval_chunk_size, self.reward_call(reward_fn)),
            self.prompts,
            np.asarray(groups),
            self.settings,
            num_samples_per_prompt=method.n_generations_per_prompt,
            percentiles=self.percentiles,
            max_samples_per_prompt=method.max_samples_per_prompt,
        )

    def learn(self) -> None:
        """Runs up to `total_steps` optimizer steps, or `epochs` passes over kept samples."""
        root_key = jax.random.fold_in(self.root_key, TRAINING_STREAM)
        sampling_key, update_key = jax.random.split(root_key)
        with self.running(num_steps=self.config.train.total_steps) as run:
            run.begin()
            if self.finished:  # an earlier run had as many passes
                run.end_before()
            for iteration in run.remaining():
                news = self.begin_pass(run, sampling_key) if self.samples is None else News({}, None)
                with run.stopwatch("data"):
                    batch = self.next_batch()
                    sequences = place_rows(self.mesh, batch)
                key = jax.random.fold_in(update_key, iteration)
                self.state, metrics = self.update(self.state, self.frozen, sequences, key)
                self.end_step()
                if self.finished:
                    run.end_here()
                run.after({"sft/tokens": float(batch.mask.sum())} | news.metrics, metrics, news.rows)

    def rehearse(self) -> Rehearsal:
        """Samples each prompt, and learns the first batch of what is kept.

        Raises:
          RewardError: If no sample has a score.
        """
        with jax.set_mesh(self.mesh):
            found = self.collect(self.params, self.frozen, 0, self.root_key, stopwatch=Stopwatch())
            if found.kept is None:
                raise RewardError(
                    f"`reward_fn` failed on each of {len(found.rows)} samples, or answered None: there is nothing to "
                    "learn from. Call it on some completions by hand."
                )
            self.kept, self.num_passes = found.kept, 1
            self.samples, figures = self.choose(0)
            batch = self.next_batch()
            self.state, metrics = self.update(
                self.state, self.frozen, place_rows(self.mesh, batch), self.root_key
            )
            return rehearsed(batch, metrics, rows=found.rows, host=found.metrics | figures)

    def begin_pass(self, run: Run, key: PRNGKey) -> News:
        """Chooses what the next pass learns, after a new round where the last one is used up.

        Args:
          run: Whose stopwatch the round reads.
          key: Of all rounds.
        """
        step = self.num_passes % self.method.n_improve_steps
        news = self.sample(run, key) if step == 0 else News({}, None)
        self.num_passes, self.num_steps_of_pass = self.num_passes + 1, 0
        self.samples, figures = self.choose(step)
        return News(news.metrics | figures, news.rows)

    def sample(self, run: Run, key: PRNGKey) -> News:
        """A round that leaves something to learn from.

        Raises:
          RewardError: If `MAX_EMPTY_ROUNDS` in a row have no score at all.
        """
        run.flush()  # a round waits for the parameters anyway; so its time is not counted as the update's
        for empty in range(MAX_EMPTY_ROUNDS):
            number = self.num_rounds
            found = self.collect(
                self.params,
                self.frozen,
                number,
                jax.random.fold_in(key, number),
                stopwatch=run.stopwatch,
            )
            # Not before: a run that the reward function stopped samples the same round again.
            self.num_rounds += 1
            if found.kept is not None:
                self.kept = found.kept
                return News(found.metrics | {"rft/empty_rounds": float(empty)}, found.rows)
            warnings.warn(
                f"Round {number} keeps nothing: `reward_fn` failed on all of its {len(found.rows)} samples, or "
                "answered None. Another one is sampled.",
                stacklevel=2,
            )
        raise RewardError(
            f"`reward_fn` failed on every sample of {MAX_EMPTY_ROUNDS} rounds in a row, or answered None, so there is "
            "nothing to learn from. Is a service it calls down? Give a reward function that applies to every prompt."
        )

    def choose(self, step: int) -> tuple[CompletionSet, dict[str, float]]:
        """Samples that improve step `step` of the round learns, and their figures."""
        assert self.kept is not None, "a pass follows a round"
        kept = self.kept.at_step(step)
        samples = CompletionSet(
            [self.prompt_tokens[group] for group in kept.groups],
            kept.completions,
            pad_token_id=self.settings.pad_token_id,
            max_length=self.config.train.seq_length,
            seed=self.config.train.seed,
            decoder_start_token_id=self.lm.decoder_start_token_id,
        )
        return samples, {
            "rft/round": float(self.num_rounds),
            "rft/pass": float(self.num_passes),
            "rft/percentile": float(self.percentiles[step]),
            "rft/threshold_mean": kept.threshold_means[step],
            "rft/kept": float(len(samples)),
            "rft/kept_fraction": len(samples) / kept.num_samples,
            "rft/kept_score_mean": float(kept.scores.mean()),
            "rft/duplicates": float(kept.num_duplicates),
            "rft/prompts_covered": len(np.unique(kept.groups)) / len(self.prompt_tokens),
        }

    def next_batch(self) -> Sequences:
        """The rows of the pass that come next."""
        assert self.samples is not None, "a pass has begun"
        # The number of the pass shuffles anew where two passes learn the same samples.
        number = (self.num_passes - 1) * self._steps_of(self.samples) + self.num_steps_of_pass
        return self.samples.batch(number, self.config.train.batch_size)

    def end_step(self) -> None:
        """Counts a step whose update is on its way; after the last one of a pass there is no pass."""
        assert self.samples is not None, "a pass has begun"
        self.num_steps_of_pass += 1
        if self.num_steps_of_pass == self._steps_of(self.samples):
            self.samples = None

    def _steps_of(self, samples: CompletionSet) -> int:
        return math.ceil(len(samples) / self.config.train.batch_size)

    @property
    def finished(self) -> bool:
        """True where `epochs` passes are over."""
        return self.samples is None and self.num_passes >= self.config.train.epochs

    def host_state(self) -> dict[str, Any]:
        """Position of the run, and the samples of the round that passes still to come learn from."""
        begun, over = self.num_passes, self.samples is None
        step = (begun if over else begun - 1) % self.method.n_improve_steps
        used_up = over and step == 0
        return super().host_state() | {
            "rounds": self.num_rounds,
            "passes": begun,
            "steps_of_pass": None if over else self.num_steps_of_pass,
            "kept": None if self.kept is None or used_up else self.kept.at_step(step).to_plain(),
        }

    def load_host_state(self, found: Mapping[str, Any]) -> None:
        """Puts back what `host_state` gave."""
        super().load_host_state(found)
        self.num_rounds, self.num_passes = found["rounds"], found["passes"]
        self.kept = None if found["kept"] is None else KeptSamples.from_plain(found["kept"])
        self.samples = None
        if found["steps_of_pass"] is not None:
            self.num_steps_of_pass = found["steps_of_pass"]
            self.samples, _ = self.choose((self.num_passes - 1) % self.method.n_improve_steps)

    @property
    def params(self) -> Params:
        """Trainable parameters."""
        return self.state.params

    def describe_data(self) -> dict[str, str]:
        """The prompts', with how many samples a round has."""
        found = super().describe_data()
        if found:
            samples = f"{len(self.prompts) * self.method.n_generations_per_prompt:,} samples a round"
            found["prompts"] = f"{found['prompts']}, {samples}"
            rows = len(self.prompts) * self.method.n_generations_per_prompt
            found |= warn_of_batches(self.config.train.batch_size, rows, "the samples of a round")
        return found

    def optimizer_steps(self) -> jax.Array:
        """The state's step counter."""
        return self.state.step

    @property
    def eval_chunk_size(self) -> int:
        """Evaluation samples as many rows a call as a round does."""
        return self.method.chunk_size or self.config.train.batch_size


def _make_update(
    config: TRLConfig, method: RFTConfig, reader: Reader, optimizer: optax.GradientTransformation
) -> Update:
    """The update of an optimizer batch, as a configuration asks for it."""
    return make_sft_update(
        reader,
        optimizer,
        batch_size=config.train.batch_size,
        minibatch_size=config.train.rows_per_pass,
        balance_coef=method.router_aux_loss_coef,
    )
