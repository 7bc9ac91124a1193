# SPDX-License-Identifier: Apache-2.0
"""Implicit language Q-learning on samples with rewards, and sampling steered by what was learned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jrl.data.episodes import (
    EpisodeSet,
    RewardedEpisodes,
    check_causal,
    check_unset,
    has_episodes,
    make_windows,
    read_episodes,
)
from jrl.data.offline import RewardedRows, RewardedSet
from jrl.forward import Reader
from jrl.learners.ilql import ILQLConfig, ILQLState, init_ilql_state, make_ilql_update
from jrl.rollout.sampler import GenerationSettings
from jrl.trainers.config.gen_kwargs import Sweep, parse_gen_kwargs
from jrl.trainers.config.registry import register_trainer
from jrl.trainers.config.trl_config import TRLConfig
from jrl.trainers.loading.setup import PolicyBundle, load_policy
from jrl.trainers.offline import OfflineTrainer
from jrl.trainers.plan.model_part import LanguageShapes, ModelShapes
from jrl.trainers.policy_trainer import PolicyTrainer
from jrl.trainers.programs import (
    Program,
    array_of,
    evaluation_program,
    optimizer_of,
    sequence_shapes,
    update_program,
)
from jrl.typing import ILQLBatch, Params, Update


@register_trainer("ILQLTrainer")
class ILQLTrainer(OfflineTrainer, PolicyTrainer):
    """Offline Q-learning. `state` is an `ILQLState`: policy, value and Q heads with their optimizer, and target heads.

    One iteration is one optimizer step; the update moves the target heads when their turn has come.
    """

    state: ILQLState
    samples: RewardedRows
    tokens_metric = "ilql/tokens"
    loss_metric = "ilql/loss"

    @property
    def method(self) -> ILQLConfig:
        """The algorithm's section of the configuration."""
        return self.method_as(ILQLConfig)

    def load_model(self) -> PolicyBundle:
        """The model with a value head and one or two Q heads."""
        num_q_heads = 2 if self.method.two_qs else 1
        return load_policy(self.config, self.mesh, with_value_head=True, num_q_heads=num_q_heads)

    def build(self, params: Params, make_reference: Callable[[], Params]) -> None:
        """No reference is made: nothing is compared."""
        del make_reference
        optimizer = self.make_optimizer()
        update = _make_update(self.config, self.method, self.reader, optimizer)
        self.compile_learner(lambda p: init_ilql_state(p, optimizer), update, params)

    @classmethod
    def programs(cls, config: TRLConfig, model: ModelShapes, mesh: Mesh) -> list[Program]:
        """The update of an optimizer batch, and the steered sampling call of an evaluation."""
        method, train, optimizer = config.method, config.train, optimizer_of(config)
        assert isinstance(method, ILQLConfig), "the registry saw to it"
        assert isinstance(model, LanguageShapes), "the method saw to it"
        reader = Reader(model.policy, chunk_bytes=train.logprob_chunk_bytes)
        update = _make_update(config, method, reader, optimizer)
        sequences = sequence_shapes(model, train.batch_size, train.seq_length)
        columns, rewards = (
            array_of(*sequences.mask.shape, dtype=dtype) for dtype in (jnp.int32, jnp.float32)
        )
        batch = ILQLBatch(sequences.inputs, columns, sequences.mask, rewards)
        init = partial(init_ilql_state, optimizer=optimizer)
        return [
            update_program(model, mesh, init, update, batch),
            evaluation_program(config, model, mesh, steers=True),
        ]

    def parse_generation(self, gen_kwargs: Mapping[str, Any]) -> tuple[GenerationSettings, Sweep | None]:
        """Parses `gen_kwargs` with `beta`: 1 where they say nothing of it, null to sample without Q heads."""
        return self.with_environment(
            parse_gen_kwargs(
                gen_kwargs,
                eos_token_id=self.eos_token_ids,
                pad_token_id=self.tokenizer.pad_token_id,
                steers=True,
            )
        )

    def add_data(
        self,
        *,
        samples: Sequence[Any] | None,
        rewards: Sequence[float] | None,
        prompts: Sequence[Any] | None,
        eval_prompts: Sequence[Any] | None,
    ) -> None:
        """Takes samples and rewards, or episodes. Evaluation starts from the BOS text (seq2seq: samples' prompts) by
        default."""
        if samples is not None and prompts is None and has_episodes(samples):
            if rewards is not None:
                raise ValueError(
                    "`rewards` are those of whole samples, and the turns of episodes bring their own: leave them out."
                )
            self.add_episodes(samples)
        elif samples is None or rewards is None or prompts is not None:
            raise ValueError(
                "ILQLTrainer learns from `samples` and `rewards`, or from `samples` that are episodes (mappings with "
                "`turns`): give those, and no `prompts` (`eval_prompts` are what evaluation starts from)."
            )
        else:
            self.add_samples(samples, rewards)
        self.add_default_eval_prompts(samples, eval_prompts)

    def add_episodes(self, records: Sequence[Any], *, max_length: int | None = None) -> None:
        """Sets what is learned from: recorded episodes, as `jrl.data.episodes` says.

        Args:
          records: Left untouched.
          max_length: Most tokens of a row; default: `train.seq_length`.
        """
        train, method = self.config.train, self.method
        check_causal(self.lm.decoder_start_token_id)
        windows = make_windows(
            self.tokenizer,
            max_length=max_length or train.seq_length,
            context_turns=method.context_turns,
            keep_prompt=method.keep_prompt,
            add_special_tokens=self.config.tokenizer.add_special_tokens,
        )
        found = EpisodeSet(
            read_episodes(records, self.tokenizer),
            windows,
            pad_token_id=self.tokenizer.pad_token_id,
            seed=train.seed,
            gamma=method.gamma,
            reward_scale=method.reward_scale,
        )
        self.samples = RewardedEpisodes(found, seed=train.seed)

    def add_samples(
        self, samples: Sequence[Any], rewards: Sequence[float], *, max_length: int | None = None
    ) -> None:
        """Sets what is learned from: strings, [prompt, output] pairs, or longer dialogues; for seq2seq models, pairs.

        Args:
          samples: Left untouched.
          rewards: One a sample.
          max_length: Most tokens of a sample; default: `train.seq_length`.
        """
        train, method = self.config.train, self.method
        check_unset(
            context_turns=method.context_turns is None,
            keep_prompt=not method.keep_prompt,
            reward_scale=method.reward_scale == 1.0,
        )
        self.samples = RewardedSet(
            samples,
            rewards,
            self.tokenizer,
            max_length=max_length or train.seq_length,
            seed=train.seed,
            decoder_start_token_id=self.lm.decoder_start_token_id,
            add_special_tokens=self.config.tokenizer.add_special_tokens,
        )

    @property
    def params(self) -> Params:
        """Trainable parameters, value and Q heads included, target heads not."""
        return self.state.train.params

    @property
    def sampling_params(self) -> Params:
        """The trainable parameters with the target heads in place of the Q heads: it is those that steer."""
        return {**self.params, "q_heads": self.state.target_params}

    @property
    def exported_params(self) -> Params:
        """The trainable parameters and the target heads, which a checkpoint holds under trlX's names."""
        return {**self.params, "target_q_heads": self.state.target_params}

    def data_sha256(self) -> dict[str, str]:
        """The rewards', beside what every offline trainer has."""
        return super().data_sha256() | {"rewards": self.samples.rewards_sha256()}

    def optimizer_steps(self) -> jax.Array:
        """The state's step counter."""
        return self.state.train.step


def _make_update(
    config: TRLConfig, method: ILQLConfig, reader: Reader, optimizer: optax.GradientTransformation
) -> Update:
    """The update of an optimizer batch, as a configuration asks for it."""
    return make_ilql_update(
        reader,
        optimizer,
        method,
        batch_size=config.train.batch_size,
        minibatch_size=config.train.rows_per_pass,
        objective=method.own_objective(),
    )
