# SPDX-License-Identifier: Apache-2.0
"""TRL's trainer of direct preference optimisation, over jrl's."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

from transformers import TrainingArguments
from transformers.trainer_utils import EvalPrediction

from jrl.data.preference_format import PreferenceFormat
from jrl.data.preferences import PreferenceSet
from jrl.data.records import RecordStream
from jrl.data.streaming import StreamSet
from jrl.learners.dpo_config import DPOConfig as Method
from jrl.trainers.dpo import DPOTrainer as Native
from jrl.trl.arguments import FlatArguments
from jrl.trl.collators import DPODataCollatorWithPadding
from jrl.trl.configs import DPOConfig
from jrl.trl.given import Given, untrained
from jrl.trl.models import AutoModelForCausalLM, ModelHandle, resolve_model
from jrl.trl.pairs import PairTrainer
from jrl.trl.watching import Names
from jrl.trlx.ignored import warn_ignored

__all__ = ["DPOTrainer"]

# Defaults of the older constructor's arguments: at these they say nothing, and the configuration counts.
_CLASSIC: Mapping[str, Any] = {
    "beta": 0.1,
    "label_smoothing": 0,
    "loss_type": "sigmoid",
    "label_pad_token_id": -100,
    "padding_value": 0,
    "truncation_mode": "keep_end",
    "disable_dropout": True,
    "generate_during_eval": False,
    "precompute_ref_log_probs": False,
    "reference_free": False,
}
_SIDES = ("chosen", "rejected")


class DPOTrainer(PairTrainer):
    """Learns from pairs of completions without a reward model.

    Arguments that a `DPOConfig` holds too count where they differ from their default, or where `args` is transformers'
    own `TrainingArguments`.

    Args:
      model: A name, a folder, a handle of `from_pretrained`, or what else `resolve_model` takes.
      ref_model: Likewise; None: the policy as it starts, without its adapter where it has one.
      beta: As in the configuration.
      args: A `DPOConfig`, or transformers' `TrainingArguments`; also taken as the third argument, as in newer releases.
      data_collator: Of the loaders; a run makes its own batches.
      label_pad_token_id: As in the configuration.
      padding_value: As in the configuration.
      truncation_mode: As in the configuration.
      train_dataset: Rows with `chosen` and `rejected` (texts or messages) and `prompt`, or both begin with it.
      eval_dataset: The same, or several sets by name.
      tokenizer: Default: that of the model's folder.
      model_init: Makes the model where `model` is None.
      callbacks: Of transformers.
      optimizers: (an optax transformation, None), or (None, a function from the step to the learning rate).
      preprocess_logits_for_metrics: No effect: rewards are compared, not logits.
      max_length: As in the configuration.
      max_prompt_length: As in the configuration.
      peft_config: An adapter trains; the model without it is the reference.
      disable_dropout: As in the configuration.
      label_smoothing: As in the configuration.
      loss_type: As in the configuration.
      max_target_length: As `max_completion_length` of the configuration.
      is_encoder_decoder: No effect: the checkpoint says what it is.
      generate_during_eval: No effect.
      compute_metrics: No effect: an evaluation has the metrics of the rewards.
      precompute_ref_log_probs: As in the configuration.
      dataset_num_proc: As in the configuration.
      model_init_kwargs: As in the configuration.
      ref_model_init_kwargs: As in the configuration.
      model_adapter_name: No effect.
      ref_adapter_name: Refused.
      reference_free: As in the configuration.
      processing_class: The tokenizer under its newer name.
      optimizer_cls_and_kwargs: A function that makes an optax transformation, and its arguments.
    Raises:
      ValueError: If both `ref_model` and `peft_config` are given.
    """

    config_class: ClassVar[type[FlatArguments]] = DPOConfig
    native_class = Native
    model_class = AutoModelForCausalLM
    NAMES: ClassVar[Names] = {
        "dpo/loss": "loss",
        "dpo/entropy": "entropy",
        "dpo/token_accuracy": "mean_token_accuracy",
    } | {
        name: name
        for name in (
            "rewards/chosen",
            "rewards/rejected",
            "rewards/accuracies",
            "rewards/margins",
            "rewards/displaced",
            "logps/chosen",
            "logps/rejected",
            "logits/chosen",
            "logits/rejected",
        )
    }

    def __init__(
        self,
        model: Any = None,
        ref_model: Any = None,
        beta: float = 0.1,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        label_pad_token_id: int = -100,
        padding_value: int | None = 0,
        truncation_mode: str = "keep_end",
        train_dataset: Any = None,
        eval_dataset: Any = None,
        tokenizer: Any = None,
        model_init: Callable[[], Any] | None = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        max_length: int | None = None,
        max_prompt_length: int | None = None,
        peft_config: Any = None,
        disable_dropout: bool = True,
        label_smoothing: float = 0,
        loss_type: str | list[str] = "sigmoid",
        max_target_length: int | None = None,
        is_encoder_decoder: bool | None = None,
        generate_during_eval: bool = False,
        compute_metrics: Callable[[EvalPrediction], Mapping[str, Any]] | None = None,
        precompute_ref_log_probs: bool = False,
        dataset_num_proc: int | None = None,
        model_init_kwargs: dict[str, Any] | None = None,
        ref_model_init_kwargs: dict[str, Any] | None = None,
        model_adapter_name: str | None = None,
        ref_adapter_name: str | None = None,
        reference_free: bool = False,
        processing_class: Any = None,
        optimizer_cls_and_kwargs: tuple[Callable[..., Any], Mapping[str, Any]] | None = None,
    ) -> None:
        if isinstance(beta, TrainingArguments):
            args, beta = beta, _CLASSIC["beta"]
        if ref_model is not None and peft_config is not None:
            raise ValueError(
                "`ref_model` must be None with `peft_config`: the reference is the model without its adapter."
            )
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
        named: dict[str, Any] = {
            "beta": beta,
            "label_smoothing": label_smoothing,
            "loss_type": loss_type,
            "label_pad_token_id": label_pad_token_id,
            "padding_value": padding_value,
            "truncation_mode": truncation_mode,
            "disable_dropout": disable_dropout,
            "generate_during_eval": generate_during_eval,
            "precompute_ref_log_probs": precompute_ref_log_probs,
            "reference_free": reference_free,
        }
        if isinstance(args, DPOConfig) or args is None:
            named = {name: value for name, value in named.items() if value != _CLASSIC[name]}
        if isinstance(named.get("loss_type"), str):
            named["loss_type"] = [named["loss_type"]]
        self._ref_model = ref_model
        self._stored: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        super().__init__(
            given,
            **named,
            max_length=max_length,
            max_prompt_length=max_prompt_length,
            max_completion_length=max_target_length if max_target_length is not None else _older_length(args),
            is_encoder_decoder=is_encoder_decoder,
            dataset_num_proc=dataset_num_proc,
            model_init_kwargs=model_init_kwargs,
            ref_model_init_kwargs=ref_model_init_kwargs,
            model_adapter_name=model_adapter_name,
            ref_adapter_name=ref_adapter_name,
        )

    # What differs from the other trainers.

    def _limits(self, handle: ModelHandle) -> dict[str, Any]:
        config = self.flat
        start = handle.config.decoder_start_token_id if handle.is_encoder_decoder else None
        return {
            "max_length": self.max_length,
            "max_prompt_length": config.max_prompt_length,
            "max_completion_length": config.max_completion_length,
            "truncation_mode": config.truncation_mode,
            "decoder_start_token_id": start,
        }

    def _make_samples(self, records: Any, handle: ModelHandle, *, evaluation: bool) -> Any:
        del evaluation
        config, limits = self.flat, self._limits(handle)
        if isinstance(records, RecordStream):
            if config.precompute_ref_log_probs:
                raise ValueError(
                    "`precompute_ref_log_probs` needs all rows beforehand, and a stream has no end."
                )
            rows = PreferenceFormat(tokenizer=self.tokenizer, **limits)
            return StreamSet(records, rows.encode, rows.collate, seed=config.seed)
        processes = config.dataset_num_proc
        return PreferenceSet(records, self.tokenizer, seed=config.seed, num_proc=processes, **limits)

    def _method(self, handle: ModelHandle) -> Method:
        config = self.flat
        streams = isinstance(self._samples, StreamSet)
        return Method(
            beta=config.beta,
            loss_type=list(config.loss_type),
            loss_weights=config.loss_weights,
            label_smoothing=config.label_smoothing,
            reference_free=config.reference_free,
            f_divergence_type=config.f_divergence_type,
            f_alpha_divergence_coef=config.f_alpha_divergence_coef,
            ld_alpha=config.ld_alpha,
            use_weighting=config.use_weighting,
            discopop_tau=config.discopop_tau,
            precompute_ref_log_probs=False if streams else config.precompute_ref_log_probs or None,
            precompute_ref_batch_size=config.precompute_ref_batch_size,
            ref_model_path=self._reference_source(handle),
            sync_ref_model=config.sync_ref_model,
            ref_model_mixup_alpha=config.ref_model_mixup_alpha,
            ref_model_sync_steps=config.ref_model_sync_steps,
            max_prompt_length=config.max_prompt_length,
            max_completion_length=config.max_completion_length,
            truncation_mode=config.truncation_mode,
            disable_dropout=config.disable_dropout,
        )

    def _reference_source(self, handle: ModelHandle) -> Any:
        """Where a reference of its own comes from; None: the policy as it starts is the same."""
        given, found = self._ref_model, self.flat.ref_model_init_kwargs
        kwargs = found if isinstance(found, dict) else {}
        if given is None:
            self.ref_model: ModelHandle | None = None
            return None
        if isinstance(given, str | os.PathLike):
            self.ref_model = AutoModelForCausalLM.from_pretrained(given, **kwargs)
        else:
            self.ref_model = untrained(resolve_model(given), "ref_model")
        same = isinstance(self.ref_model.source, str) and self.ref_model.source == handle.source
        return None if same and not handle.is_peft_model else self.ref_model.source

    def _before_learning(self) -> None:
        """The reference scores all evaluation sets, as long as it is there."""
        for samples in self._eval_samples.values():
            if self.native_dpo.precomputes:
                self.native_dpo.score_reference(samples)

    def _collator(self, given: Any) -> Callable[[list[Any]], Any]:
        if given is not None:
            return cast(Callable[[list[Any]], Any], given)
        config = self.flat
        return DPODataCollatorWithPadding(
            self.tokenizer,
            max_length=self.max_length,
            max_prompt_length=config.max_prompt_length,
            label_pad_token_id=config.label_pad_token_id,
            padding_value=config.padding_value,
            truncation_mode=config.truncation_mode,
        )

    def _computed(self, samples: Any) -> dict[str, float]:
        if self.compute_metrics is not None:
            warn_ignored(
                "compute_metrics", "an evaluation of DPO has the metrics of the rewards, and no predictions"
            )
        return {}


def _older_length(args: TrainingArguments | None) -> int | None:
    return args.max_target_length if isinstance(args, DPOConfig) else None
