# SPDX-License-Identifier: Apache-2.0
"""TRL's trainer of reward models, over jrl's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import jax
import numpy as np
from transformers import TrainingArguments
from transformers.trainer_utils import EvalPrediction

from jrl.data.preferences import ComparisonSet
from jrl.data.records import RecordStream
from jrl.data.streaming import StreamSet
from jrl.learners.reward_model_config import RewardConfig as Method
from jrl.trainers.reward import RewardTrainer as Native
from jrl.trl.arguments import FlatArguments
from jrl.trl.collators import RewardDataCollatorWithPadding
from jrl.trl.configs import RewardConfig
from jrl.trl.given import Given
from jrl.trl.models import AutoModelForSequenceClassification, ModelHandle
from jrl.trl.saving import FlatTrainer
from jrl.trl.watching import Names

__all__ = ["RewardTrainer"]


class RewardTrainer(FlatTrainer):
    """Learns a score for texts from pairs of which one is preferred.

    Args:
      model: A name, a folder, a handle of `from_pretrained`, or what else `resolve_model` takes.
      args: A `RewardConfig`, or transformers' `TrainingArguments`.
      data_collator: Of the loaders; a run makes its own batches.
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
        given = Given(
            model=model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            tokenizer=tokenizer if processing_class is None else processing_class,
            model_init=model_init,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            peft_config=peft_config,
        )
        super().__init__(given, max_length=max_length)

    @property
    def native_reward(self) -> Native:
        """jrl's own trainer."""
        return cast(Native, self.native)

    def _make_samples(self, records: Any, handle: ModelHandle, *, evaluation: bool) -> Any:
        del handle, evaluation
        options: dict[str, Any] = {"max_length": self.max_length, "seed": self.config.seed}
        if isinstance(records, RecordStream):
            from jrl.data.comparison_format import ComparisonFormat

            rows = ComparisonFormat(tokenizer=self.tokenizer, max_length=self.max_length)
            return StreamSet(records, rows.encode, rows.collate, seed=self.config.seed)
        processes = cast(RewardConfig, self.config).dataset_num_proc
        return ComparisonSet(records, self.tokenizer, num_proc=processes, **options)

    def _method(self, handle: ModelHandle) -> Method:
        config = cast(RewardConfig, self.config)
        return Method(
            center_rewards_coefficient=config.center_rewards_coefficient,
            disable_dropout=config.disable_dropout,
        )

    def _collator(self, given: Any) -> Callable[[list[Any]], Any]:
        if given is not None:
            return cast(Callable[[list[Any]], Any], given)
        return RewardDataCollatorWithPadding(self.tokenizer, max_length=self.max_length)

    def score(self, samples: ComparisonSet) -> np.ndarray:
        """Scores (N 2) of the chosen and the rejected text of every pair, in the order of the rows."""
        native, size = self.native_reward, self.native.config.train.batch_size
        scorer = jax.jit(native.scorer)
        found = []
        with jax.set_mesh(native.mesh):
            for start in range(0, len(samples), size):
                indices = np.arange(start, start + size)
                real = indices < len(samples)
                rows = native.place(samples.batch_of(np.where(real, indices, 0), real))
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
