# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning on texts, prompt-output pairs, dialogues and records of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from jrl.data.demonstrations.packing import PackedSet
from jrl.forward import Reader
from jrl.learners.accumulate import Loss
from jrl.learners.sft import SFTConfig, make_sft_update, sft_objective
from jrl.learners.state import TrainState, init_train_state
from jrl.losses.sft import LOSSES
from jrl.models.noise import EmbeddingNoise
from jrl.trainers.config.registry import register_trainer
from jrl.trainers.config.trl_config import TRLConfig
from jrl.trainers.loading.setup import PolicyBundle, load_policy
from jrl.trainers.offline import OfflineTrainer
from jrl.trainers.plan.model_part import LanguageShapes, ModelShapes
from jrl.trainers.policy_trainer import PolicyTrainer
from jrl.trainers.programs import (
    Program,
    evaluation_program,
    optimizer_of,
    sequence_shapes,
    update_program,
)
from jrl.trainers.sft_data import SFTSamples, make_samples, prompts_of
from jrl.typing import Frozen, Params, Sequences, Update


@register_trainer("SFTTrainer")
class SFTTrainer(OfflineTrainer, PolicyTrainer):
    """Next-token training. `state` is a `TrainState`; one iteration is one optimizer step."""

    state: TrainState
    samples: SFTSamples
    tokens_metric = "sft/tokens"
    loss_metric = "sft/loss"

    @property
    def method(self) -> SFTConfig:
        """The algorithm's section of the configuration."""
        assert isinstance(self.config.method, SFTConfig), "the configuration saw to it"
        return self.config.method

    def load_model(self) -> PolicyBundle:
        """The model, with noise on its embeddings where the configuration wants it."""
        alpha = self.method.neftune_noise_alpha
        noise = None if alpha is None else EmbeddingNoise(alpha, alone=self.method.disable_dropout)
        return load_policy(self.config, self.mesh, with_value_head=False, noise=noise)

    def build(self, params: Params, make_reference: Callable[[], Params]) -> None:
        """No reference is made: nothing is compared."""
        del make_reference
        optimizer, token_loss = self.make_optimizer(), LOSSES[self.method.loss_type]
        update = _make_update(self.config, self.method, self.reader, optimizer, self.own_objective)
        self.compile_learner(lambda p: init_train_state(p, optimizer), update, params)
        self.compile_evaluation(
            self.own_objective or partial(sft_objective, self.reader, token_loss=token_loss)
        )

    @classmethod
    def programs(cls, config: TRLConfig, model: ModelShapes, mesh: Mesh) -> list[Program]:
        """The update of an optimizer batch, and the sampling call of an evaluation."""
        method, optimizer = config.method, optimizer_of(config)
        assert isinstance(method, SFTConfig), "the configuration saw to it"
        assert isinstance(model, LanguageShapes), "the method saw to it"
        reader = Reader(model.policy, chunk_bytes=config.train.logprob_chunk_bytes)
        update = _make_update(config, method, reader, optimizer)
        init = partial(init_train_state, optimizer=optimizer)
        sequences = sequence_shapes(model, config.train.batch_size, config.train.seq_length, method.packing)
        return [update_program(model, mesh, init, update, sequences), evaluation_program(config, model, mesh)]

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
            is_seq2seq = self.lm.decoder_start_token_id is not None
            batch_size = self.config.train.batch_size
            eval_prompts = prompts_of(samples, batch_size) if is_seq2seq else self.default_prompts()
        self.add_eval_prompts(eval_prompts)

    def add_samples(
        self,
        samples: Any,
        *,
        max_length: int | None = None,
        text_field: str = "text",
        formatting_fn: Callable[[Mapping[str, Any]], str] | None = None,
        append_eos: bool = True,
        num_proc: int | None = None,
    ) -> None:
        """Sets what is learned.

        Args:
          samples: Texts, [prompt, output] pairs or longer dialogues as lists of texts; or mappings with a text, with
            `messages`, or with `prompt` and `completion`; or a `RecordStream` of texts or mappings. Left untouched.
          max_length: Most tokens of a row; default: `train.seq_length`.
          text_field: The mappings' column of texts.
          formatting_fn: Makes a text of each record, whatever its columns.
          append_eos: Whether the texts of mappings are ended with EOS.
          num_proc: Worker processes that tokenise mappings.
        """
        self.samples = self._make(
            samples,
            self.method.packing,
            max_length,
            text_field=text_field,
            formatting_fn=formatting_fn,
            append_eos=append_eos,
            num_proc=num_proc,
        )

    def add_eval_samples(
        self,
        samples: Sequence[Any],
        *,
        max_length: int | None = None,
        text_field: str = "text",
        formatting_fn: Callable[[Mapping[str, Any]], str] | None = None,
        append_eos: bool = True,
        num_proc: int | None = None,
    ) -> None:
        """Sets what evaluations measure the loss on: as `add_samples`, but no stream."""
        packing = self.method.packing if self.method.eval_packing is None else self.method.eval_packing
        self.eval_samples = self._make(
            samples,
            packing,
            max_length,
            text_field=text_field,
            formatting_fn=formatting_fn,
            append_eos=append_eos,
            num_proc=num_proc,
        )

    def _make(self, samples: Any, packing: bool, max_length: int | None, **options: Any) -> SFTSamples:
        train = self.config.train
        return make_samples(
            samples,
            self.tokenizer,
            self.method,
            packing=packing,
            max_length=max_length or train.seq_length,
            seed=train.seed,
            decoder_start_token_id=self.lm.decoder_start_token_id,
            add_special_tokens=self.config.tokenizer.add_special_tokens,
            **options,
        )

    def describe_data(self) -> dict[str, str]:
        """Describes the data, with the fill of packed rows."""
        found = super().describe_data()
        if "samples" in vars(self) and isinstance(self.samples, PackedSet):
            packed = self.samples
            found["packing"] = (
                f"{packed.num_samples:,} samples in {len(packed):,} rows, {packed.efficiency:.1%} full, "
                f"{packed.num_lost:,} tokens lost"
            )
        return found

    @property
    def params(self) -> Params:
        """Trainable parameters."""
        return self.state.params

    def optimizer_steps(self) -> jax.Array:
        """The state's step counter."""
        return self.state.step


def _make_update(
    config: TRLConfig,
    method: SFTConfig,
    reader: Reader,
    optimizer: optax.GradientTransformation,
    objective: Callable[[Params, Frozen, Sequences], Loss] | None = None,
) -> Update:
    """The update of an optimizer batch, as a configuration asks for it."""
    return make_sft_update(
        reader,
        optimizer,
        batch_size=config.train.batch_size,
        minibatch_size=config.train.rows_per_pass,
        token_loss=LOSSES[method.loss_type],
        dropout=not method.disable_dropout,
        noise=method.neftune_noise_alpha is not None,
        objective=objective,
        balance_coef=method.router_aux_loss_coef,
    )
