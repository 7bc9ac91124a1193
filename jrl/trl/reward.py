# SPDX-License-Identifier: Apache-2.0
"""TRL's trainer of reward models, over jrl's."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from transformers import TrainingArguments
from transformers.trainer_utils import EvalPrediction

from jrl.compilation import COMPILER_OPTIONS
from jrl.data.preferences import ComparisonFormat, ComparisonSet
from jrl.data.sources import RecordStream, StreamSet
from jrl.interop import own_methods
from jrl.learners.accumulate import Loss
from jrl.learners.reward_model import reward_model_objective
from jrl.learners.reward_model_config import RewardConfig as Method
from jrl.losses.reward_model import reward_model_loss
from jrl.placement import place_rows
from jrl.trainers.reward_model import RewardTrainer as Native
from jrl.trl.arguments import FlatArguments
from jrl.trl.collated_rows import collated_comparisons, comparison_features, refuse_stream
from jrl.trl.collators import RewardDataCollatorWithPadding
from jrl.trl.configs import RewardConfig
from jrl.trl.constructor_arguments import Given
from jrl.trl.flat_trainer import FlatTrainer
from jrl.trl.models import AutoModelForSequenceClassification, ModelHandle
from jrl.trl.own_losses import SIDES, TracedModel, comparison_inputs, own_objective, refuse_options
from jrl.trl.run_state import Names
from jrl.typing import ComparisonBatch, Frozen, ModelInputs, Params

__all__ = ["RewardTrainer", "compute_accuracy"]


class RewardTrainer(FlatTrainer):
    """Learns a score for texts from pairs of which one is preferred.

    A subclass may override `compute_loss`, from which the run then learns, and `log`. Other methods of transformers'
    `Trainer` are refused where nothing would call them.

    Args:
      model: A name, a folder, a handle of `from_pretrained`, or what else `resolve_model` takes.
      args: A `RewardConfig`, or transformers' `TrainingArguments`.
      data_collator: Decides what is learned: it is asked once for each row, and returns TRL's columns.
      train_dataset: Rows with `chosen` and `rejected` (texts or messages), perhaps `prompt` and `margin`; or the
        pre-tokenised columns `input_ids_chosen`, ...
      eval_dataset: The same, or several sets by name.
      tokenizer: Default: that of the model's folder.
      model_init: Makes the model where `model` is None.
      compute_metrics: Gets the scores (N 2) of chosen and rejected as predictions, and labels 0.
      callbacks: Of transformers.
      optimizers: (an optax transformation, None), or (None, a function from the step to the learning rate).
      preprocess_logits_for_metrics: Called with scores and labels before `compute_metrics`.
      max_length: As in the configuration.
      peft_config: An adapter trains; the score head with it.
      processing_class: The tokenizer under its newer name.
      optimizer_cls_and_kwargs: A function that makes an optax transformation, and its arguments.
    """

    config_class: ClassVar[type[FlatArguments]] = RewardConfig
    native_class = Native
    model_class = AutoModelForSequenceClassification
    TRACED = ("compute_loss",)
    TAGS = ("trl", "reward-trainer")
    NAMES: ClassVar[Names] = {
        "reward_model/loss": "loss",
        "reward_model/accuracy": "accuracy",
        "reward_model/margin": "margin",
        "reward_model/score_min": "min_reward",
        "reward_model/score_mean": "mean_reward",
        "reward_model/score_max": "max_reward",
    }

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        tokenizer: Any = None,
        model_init: Callable[[], Any] | None = None,
        compute_metrics: Callable[[EvalPrediction], Mapping[str, Any]] | None = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        max_length: int | None = None,
        peft_config: Any = None,
        processing_class: Any = None,
        optimizer_cls_and_kwargs: tuple[Callable[..., Any], Mapping[str, Any]] | None = None,
    ) -> None:
        given = Given.of(locals())
        self._by_collator = data_collator is not None
        super().__init__(given, max_length=max_length)

    def _handle(self, given: Given) -> ModelHandle:
        """The model; a classifier of several labels gets a fresh head with one."""
        found = super()._handle(given)
        labels = found.num_scored_labels
        if labels in (None, 1):
            return found
        warnings.warn(
            f"`model` scores {labels} labels, and a reward model one: a fresh head takes the place of its own. Load it "
            "with `num_labels=1`, or name a language model.",
            stacklevel=4,
        )
        return dataclasses.replace(found, model_extra_configs={**found.model_extra_configs, "num_labels": 1})

    @property
    def native_reward(self) -> Native:
        """jrl's own trainer."""
        return cast(Native, self.native)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The configured loss of pairs; a run learns from a subclass's own.

        Args:
          model: `(input_ids, attention_mask)` → an output with `logits` (rows, 1).
          inputs: `input_ids_chosen`, `attention_mask_chosen`, the same of `rejected`, and perhaps `margin`.
          return_outputs: Whether to return the scores as well, as `rewards_chosen` and `rewards_rejected`.
          num_items_in_batch: Of transformers; no effect.
        Returns:
          The mean over pairs, or a pair of it and the scores.
        """
        del num_items_in_batch
        scores = [
            model(
                input_ids=inputs[f"input_ids_{side}"], attention_mask=inputs[f"attention_mask_{side}"]
            ).logits[:, 0]
            for side in SIDES
        ]
        margins = jnp.asarray(inputs.get("margin", jnp.zeros_like(scores[0])), jnp.float32)
        coefficient = self._center_coef
        out = reward_model_loss(
            scores[0], scores[1], margins, jnp.ones(margins.shape, bool), center_coef=coefficient
        )
        loss = out.loss_sum / out.weight
        return (
            (loss, {"rewards_chosen": scores[0], "rewards_rejected": scores[1]}) if return_outputs else loss
        )

    @property
    def _center_coef(self) -> float:
        return cast(RewardConfig, self.config).center_rewards_coefficient or 0.0

    def own_objective(self) -> Callable[[Params, Frozen, Any], Loss] | None:
        """`compute_loss`, where a subclass has its own."""
        if not own_methods(self, RewardTrainer, self.TRACED):
            return None
        refuse_options(self, dropout=not cast(RewardConfig, self.config).disable_dropout)
        return self._objective

    def _objective(self, params: Params, frozen: Frozen, batch: ComparisonBatch) -> Loss:
        scorer, inputs = self.native_reward.loaded.scorer, comparison_inputs(batch)

        def logits(ids: jax.Array, mask: jax.Array) -> jax.Array:
            return scorer(params, frozen, ModelInputs(ids, mask), None)[:, None]

        return own_objective(
            self,
            TracedModel(logits, self.model, with_labels=False, beside=inputs),
            inputs,
            batch.valid,
            "reward_model/loss",
            reward_model_objective(scorer, params, frozen, batch, center_coef=self._center_coef),
        )

    def _make_samples(self, records: Any, handle: ModelHandle, *, evaluation: bool) -> Any:
        del handle, evaluation
        if self._by_collator:
            refuse_stream(records)
            records = collated_comparisons(records, self._format, self.data_collator)
        options: dict[str, Any] = {"max_length": self.max_length, "seed": self.config.seed}
        if isinstance(records, RecordStream):
            return StreamSet(records, self._format.encode, self._format.collate, seed=self.config.seed)
        processes = cast(RewardConfig, self.config).dataset_num_proc
        return ComparisonSet(records, self.tokenizer, num_proc=processes, **options)

    @property
    def _format(self) -> ComparisonFormat:
        return ComparisonFormat(tokenizer=self.tokenizer, max_length=self.max_length)

    def _collate(self, records: list[Any]) -> Any:
        """A given collator sees ids, as it does when it decides what is learned."""
        if not self._by_collator:
            return super()._collate(records)
        return self.data_collator(comparison_features(records, self._format))

    def _method(self, handle: ModelHandle) -> Method:
        config = cast(RewardConfig, self.config)
        return Method(
            center_rewards_coefficient=config.center_rewards_coefficient,
            disable_dropout=config.disable_dropout,
        )

    def _collator(self, given: Any) -> Callable[[list[Any]], Any]:
        if given is not None:
            return cast(Callable[[list[Any]], Any], given)
        return RewardDataCollatorWithPadding(self.tokenizer, return_tensors="np")

    def score(self, samples: ComparisonSet) -> np.ndarray:
        """Scores (N 2) of the chosen and the rejected text of every pair, in the order of the rows."""
        native, size = self.native_reward, self.native.config.train.batch_size
        scorer = jax.jit(native.loaded.scorer, compiler_options=COMPILER_OPTIONS)
        found = []
        with jax.set_mesh(native.mesh):
            for start in range(0, len(samples), size):
                indices = np.arange(start, start + size)
                real = indices < len(samples)
                rows = place_rows(native.mesh, samples.batch_of(np.where(real, indices, 0), real))
                both = [
                    scorer(native.params, native.frozen, half, None) for half in (rows.chosen, rows.rejected)
                ]
                found.append(np.stack([np.asarray(half) for half in both], axis=1)[real])
        return np.concatenate(found)

    def _prediction(self, samples: Any) -> EvalPrediction:
        scores = self.score(samples)
        labels = np.zeros(len(scores), np.int64)
        if self.preprocess_logits_for_metrics is not None:
            scores = np.asarray(self.preprocess_logits_for_metrics(scores, labels))
        return EvalPrediction(scores, labels)


def compute_accuracy(eval_pred: EvalPrediction | tuple[Any, Any]) -> dict[str, float]:
    """`compute_metrics` of a reward model: the share of pairs whose chosen text has the higher score; a tie is wrong.

    Args:
      eval_pred: (scores (N 2) of chosen and rejected, labels), labels being the column of the better text: 0.
    """
    scores, labels = (np.asarray(part) for part in (eval_pred[0], eval_pred[1]))
    other = np.take_along_axis(scores, 1 - labels[:, None], axis=1)[:, 0]
    own = np.take_along_axis(scores, labels[:, None], axis=1)[:, 0]
    return {"accuracy": float(np.mean(own > other))}
