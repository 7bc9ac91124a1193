# SPDX-License-Identifier: Apache-2.0
"""Training of a reward model on comparisons of texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jrl.data.preferences.comparison_format import ComparisonFormat, ComparisonRow
from jrl.data.preferences.preference_set import ComparisonSet
from jrl.data.sources.records import RecordStream
from jrl.data.sources.streams import StreamSet
from jrl.learners.accumulate import OwnObjective
from jrl.learners.reward_model import make_reward_model_update, reward_model_objective
from jrl.learners.reward_model_config import RewardConfig
from jrl.learners.state import TrainState, init_train_state
from jrl.models.adapters.lora import Lora
from jrl.models.classifier import Classifier
from jrl.models.heads import HeadsPlace
from jrl.trainers.config.registry import register_trainer
from jrl.trainers.config.trl_config import TRLConfig
from jrl.trainers.loading.reward_model import APPEND_EOS
from jrl.trainers.loading.scorer import ScorerBundle, load_scorer, scorer_writer
from jrl.trainers.loggers.description import describe_scorer
from jrl.trainers.offline import OfflineTrainer, measuring_program
from jrl.trainers.plan.model_part import ClassifierShapes, ModelShapes
from jrl.trainers.programs import Program, array_of, optimizer_of, rows_on, update_program, weights_on
from jrl.typing import ComparisonBatch, ModelInputs, Params, Scorer, Update


@register_trainer("RewardTrainer")
class RewardTrainer(OfflineTrainer):
    """A score for texts, learned from pairs of which one is preferred. `state` is a `TrainState`.

    One iteration is one optimizer step. What a run writes is a sequence classifier with one label, or a LoRA adapter of
    one, which `jrl.load_reward_model` makes a reward function of.
    """

    state: TrainState
    loaded: ScorerBundle
    samples: ComparisonSet | StreamSet[ComparisonRow, ComparisonBatch]
    _ends_in_eos: bool | None = None
    tokens_metric = "reward_model/tokens"
    loss_metric = "reward_model/loss"

    @property
    def method(self) -> RewardConfig:
        """The algorithm's section of the configuration."""
        return self.method_as(RewardConfig)

    def load_model(self) -> ScorerBundle:
        """A classifier with one label, or a language model with a fresh head."""
        return load_scorer(self.config, self.mesh, dropout=not self.method.disable_dropout)

    @property
    def model(self) -> Classifier:
        """Architecture and checkpoint names."""
        return self.loaded.model

    def build(self, params: Params, make_reference: Callable[[], Params]) -> None:
        """No reference is made: nothing is compared."""
        del make_reference
        optimizer, scorer = self.make_optimizer(), self.loaded.scorer
        update = _make_update(self.config, self.method, scorer, optimizer, self.own_objective)
        self.compile_learner(lambda p: init_train_state(p, optimizer), update, params)
        self.compile_evaluation(self.own_objective or _objective(self.method, scorer))

    @classmethod
    def programs(cls, config: TRLConfig, model: ModelShapes, mesh: Mesh) -> list[Program]:
        """The update of an optimizer batch, and what an evaluation measures of one."""
        method, optimizer = config.method, optimizer_of(config)
        assert isinstance(method, RewardConfig), "the registry saw to it"
        assert isinstance(model, ClassifierShapes), "the method saw to it"
        update = _make_update(config, method, model.scorer, optimizer)
        rows = partial(array_of, config.train.batch_size)
        length = config.train.seq_length
        texts = ModelInputs(rows(length, dtype=jnp.int32), rows(length, dtype=jnp.bool_))
        batch = ComparisonBatch(texts, texts, rows(dtype=jnp.bool_), rows())
        init = partial(init_train_state, optimizer=optimizer)
        weights = weights_on(mesh, model.params), weights_on(mesh, model.frozen)
        measure = measuring_program(_objective(method, model.scorer), mesh)
        return [
            update_program(model, mesh, init, update, batch),
            Program("evaluate", measure, (*weights, rows_on(mesh, batch))),
        ]

    def add_data(
        self,
        *,
        samples: Sequence[Any] | None,
        rewards: Sequence[float] | None,
        prompts: Sequence[Any] | None,
        eval_prompts: Sequence[Any] | None,
    ) -> None:
        """Takes samples: mappings with `chosen` and `rejected`, perhaps `prompt` and `margin`."""
        others = (rewards, prompts, eval_prompts)
        if samples is None or any(given is not None for given in others):
            raise ValueError(
                "RewardTrainer learns from `samples` with `chosen` and `rejected`: give those, and neither `rewards` "
                "nor `prompts` nor `eval_prompts`; `add_eval_samples` takes held-out pairs."
            )
        self.add_samples(samples)

    def add_samples(self, samples: Sequence[Any] | RecordStream, *, num_proc: int | None = None) -> None:
        """Sets what is learned.

        Args:
          samples: Mappings with `chosen` and `rejected`, left untouched, or a stream of them. Pairs with a text of more
            than `train.seq_length` tokens are left out.
          num_proc: Worker processes that tokenise; a stream is tokenised as it is read.
        """
        train = self.config.train
        if isinstance(samples, RecordStream):
            rows = ComparisonFormat(tokenizer=self.tokenizer, max_length=train.seq_length)
            self.samples = StreamSet(samples, rows.encode, rows.collate, seed=train.seed)
        else:
            self.samples = self._comparisons(samples, num_proc)

    def add_eval_samples(self, samples: Sequence[Any], *, num_proc: int | None = None) -> None:
        """Sets what evaluations measure loss, accuracy and margin on: as `add_samples`, but no stream."""
        self.eval_samples = self._comparisons(samples, num_proc)

    def _comparisons(self, samples: Sequence[Any], num_proc: int | None) -> ComparisonSet:
        train = self.config.train
        return ComparisonSet(
            samples, self.tokenizer, max_length=train.seq_length, seed=train.seed, num_proc=num_proc
        )

    def place(self, batch: ComparisonBatch) -> Any:
        """Host rows on the mesh; what the first one tells of texts' ends is kept for `model_writer`."""
        if self._ends_in_eos is None:
            self._ends_in_eos = ends_in(batch, self.tokenizer.eos_token_id)
        return super().place(batch)

    def count_tokens(self, batch: ComparisonBatch) -> float:
        """Tokens of both texts of every pair that counts."""
        both = batch.chosen.attention_mask.sum(axis=1) + batch.rejected.attention_mask.sum(axis=1)
        return float((both * batch.valid).sum())

    @property
    def params(self) -> Params:
        """Trainable parameters."""
        return self.state.params

    def optimizer_steps(self) -> jax.Array:
        """The state's step counter."""
        return self.state.step

    def model_writer(
        self, *, merge_adapter: bool = False, heads: HeadsPlace = "apart"
    ) -> Callable[[Path], None]:
        """A function that writes the parameters as they are now: copied to the host here, written whenever called."""
        del heads  # a classifier's is the model's own
        adapter = self.adapter
        assert adapter is None or isinstance(adapter, Lora)
        if self._ends_in_eos is None and "samples" in vars(self):
            self.place(self.samples.batch(0, self.config.train.batch_size))
        # What reads the model as a reward function must end texts as they ended here.
        self.tokenizer.init_kwargs[APPEND_EOS] = bool(self._ends_in_eos)
        return scorer_writer(
            self.model,
            self.params,
            self.frozen,
            adapter=adapter,
            base_model=self.base_model,
            tokenizer=self.tokenizer,
            merge_adapter=merge_adapter,
        )

    @property
    def architecture(self) -> Any:
        """Architecture of the classifier."""
        return self.model.config

    def describe_model(self) -> dict[str, str]:
        """Describes the model, with the origin of its head."""
        found = describe_scorer(self.model, self.params, self.frozen, state=self.state, mesh=self.mesh)
        fresh, seed = self.loaded.fresh, self.config.train.seed
        origin = f"fresh ({', '.join(fresh)}), from seed {seed}" if fresh else "loaded"
        return found | {"score head": origin}


def _make_update(
    config: TRLConfig,
    method: RewardConfig,
    scorer: Scorer,
    optimizer: optax.GradientTransformation,
    objective: OwnObjective[ComparisonBatch] | None = None,
) -> Update:
    """The update of an optimizer batch, as a configuration asks for it."""
    return make_reward_model_update(
        scorer,
        optimizer,
        method,
        batch_size=config.train.batch_size,
        minibatch_size=config.train.rows_per_pass,
        objective=objective,
    )


def _objective(method: RewardConfig, scorer: Scorer) -> OwnObjective[ComparisonBatch]:
    """What an evaluation measures."""
    return partial(reward_model_objective, scorer, center_coef=method.center_rewards_coefficient or 0.0)


def ends_in(batch: ComparisonBatch, token: int) -> bool:
    """True where every text of a right-padded batch, NumPy rows, ends in this token."""
    return all(
        bool(
            (texts.tokens[np.arange(len(texts.tokens)), texts.attention_mask.sum(axis=1) - 1] == token).all()
        )
        for texts in (batch.chosen, batch.rejected)
    )
