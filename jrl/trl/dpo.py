# SPDX-License-Identifier: Apache-2.0
"""TRL's trainer of direct preference optimisation, over jrl's."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from transformers import TrainingArguments
from transformers.trainer_utils import EvalPrediction

from jrl.data.batching import pad_right
from jrl.data.preferences import PreferenceFormat, PreferenceSet
from jrl.data.sources import RecordStream, StreamSet
from jrl.interop import ModelOutput, TrainedModel, own_methods, warn_ignored
from jrl.learners.dpo import PairsLoss, configured_loss
from jrl.learners.dpo_config import DPOConfig as Method
from jrl.losses.dpo import (
    DIVERGENCES,
    LOSSES,
    Completion,
    completion_logprobs,
    implicit_rewards,
    pairs_from_logprobs,
)
from jrl.models.adapters import is_adapter_folder
from jrl.ops.alignment import next_predictions, next_tokens
from jrl.ops.logprobs import logprobs_from_logits
from jrl.ops.metrics import finalize
from jrl.ops.token_reads import read_tokens
from jrl.trainers.dpo import DPOTrainer as Native
from jrl.trl.arguments import FlatArguments
from jrl.trl.collated_rows import collated_preferences, preference_features, refuse_stream
from jrl.trl.collators import Batch, DPODataCollatorWithPadding
from jrl.trl.configs import DPOConfig
from jrl.trl.constructor_arguments import Given, shared_fields
from jrl.trl.flat_trainer import FlatTrainer
from jrl.trl.handles import resolve_model, same_source, untrained
from jrl.trl.models import AutoModelForCausalLM, ModelHandle
from jrl.trl.module_surface import check_rows
from jrl.trl.own_losses import own_pair_loss
from jrl.trl.refusals import DPO
from jrl.trl.run_state import Names

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
_FIGURES = ("rewards/", "logps/", "logits/")
"""How the metrics of a batch begin that TRL has, too."""


class DPOTrainer(FlatTrainer):
    """Learns from pairs of completions without a reward model.

    A subclass may override `dpo_loss`, from which the run then learns, and `log`. Other methods of TRL's are refused
    where nothing would call them.

    Arguments that a `DPOConfig` holds too count where they differ from their default, or where `args` is transformers'
    own `TrainingArguments`.

    Args:
      model: A name, a folder, a handle of `from_pretrained`, or what else `resolve_model` takes.
      ref_model: Likewise; None: the policy as it starts, without its adapter where it has one,
        which costs no second model.
      beta: As in the configuration.
      args: A `DPOConfig`, or transformers' `TrainingArguments`; also taken as the third argument, as in newer releases.
      data_collator: Decides what is learned: it is asked once for each row, and returns TRL's columns.
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
    """

    ref_model: ModelHandle | None = None
    """The reference's handle; None: the policy as it starts, or without its adapter."""
    config_class: ClassVar[type[FlatArguments]] = DPOConfig
    native_class = Native
    model_class = AutoModelForCausalLM
    TRACED = ("dpo_loss",)
    REFUSED = DPO
    TAGS = ("trl", "dpo")
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
        given = Given.of(locals())
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
        self._ref_model, self._by_collator = ref_model, data_collator is not None
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

    @property
    def flat(self) -> DPOConfig:
        """The configuration with the constructor's arguments."""
        return cast(DPOConfig, self.config)

    @property
    def native_dpo(self) -> Native:
        """jrl's own trainer."""
        return cast(Native, self.native)

    @property
    def beta(self) -> float:
        """β of the implicit reward."""
        return self.flat.beta

    @property
    def loss_type(self) -> list[str]:
        """Names of the losses."""
        return self.flat.loss_type

    @property
    def label_pad_token_id(self) -> int:
        """Label of what is not learned, in the collator's batches."""
        return self.flat.label_pad_token_id

    @property
    def padding_value(self) -> int:
        """Id of padding in the collator's batches."""
        given = self.flat.padding_value
        return int(self.tokenizer.pad_token_id if given is None else given)

    @property
    def max_prompt_length(self) -> int | None:
        """Most tokens of a prompt; None: no limit of its own."""
        return self.flat.max_prompt_length

    @property
    def truncation_mode(self) -> str:
        """The end of a long row that is kept."""
        return self.flat.truncation_mode

    def tokenize_row(self, feature: Mapping[str, Any], model: Any = None) -> Batch:
        """Ids, masks and labels of one row.

        Args:
          feature: `prompt`, `chosen` and `rejected`.
          model: Of encoder-decoders in TRL; no effect.
        """
        del model
        return DPODataCollatorWithPadding(
            self.tokenizer,
            max_length=self.max_length,
            max_prompt_length=self.flat.max_prompt_length,
            label_pad_token_id=self.label_pad_token_id,
            truncation_mode=self.flat.truncation_mode,
        ).tokenize(feature)

    def concatenated_inputs(self, batch: Batch) -> Batch:
        """Chosen rows over rejected ones, in arrays (2B L) of one width.

        Args:
          batch: Of the collator.
        Returns:
          `concatenated_input_ids`, `concatenated_attention_mask`, `concatenated_labels`.
        """
        fills = {
            "input_ids": self.padding_value,
            "attention_mask": 0,
            "labels": self.label_pad_token_id,
        }
        found = {}
        for name, fill in fills.items():
            halves = [np.asarray(batch[f"{side}_{name}"]) for side in _SIDES]
            width = max(half.shape[1] for half in halves)
            padded = [pad_right(half.tolist(), pad_token_id=fill, width=width)[0] for half in halves]
            found[f"concatenated_{name}"] = np.concatenate([np.asarray(half) for half in padded])
        return found

    def concatenated_forward(
        self, model: Any, batch: Batch
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Log-probabilities of the completions, and logits.

        Args:
          model: The trainer's `model`; its `ref_model`, or None, is the reference.
          batch: Of the collator.
        Returns:
          Sums over the completions' tokens (B), chosen and rejected; logits (B L V), likewise.
        """
        rows, labels, mask = self._rows(batch)
        output = self._output(model, *rows)
        totals = completion_logprobs(logprobs_from_logits(next_predictions(output.logits), labels), mask)
        half = len(totals) // 2
        return totals[:half], totals[half:], output.logits[:half], output.logits[half:]

    def _rows(self, batch: Batch) -> tuple[tuple[np.ndarray, np.ndarray], jax.Array, jax.Array]:
        """(ids and mask of both sides, one over the other), the token after each column, and which are learned."""
        rows = self.concatenated_inputs(batch)
        labels = next_tokens(jnp.asarray(rows["concatenated_labels"]))
        mask = labels != self.label_pad_token_id
        inputs = rows["concatenated_input_ids"], rows["concatenated_attention_mask"]
        return inputs, jnp.where(mask, labels, 0), mask

    @cached_property
    def _answers(self) -> TrainedModel:
        """Model for all calls: a shared one compiles once for each shape."""
        return TrainedModel(self.native_dpo)

    def _output(self, model: Any, ids: Any, mask: Any) -> ModelOutput:
        """A forward pass of the policy, or of the reference.

        Raises:
          ValueError: If a row is longer than the model's context, or there is no such model.
        """
        answers = self._answers
        check_rows(self.native_dpo.lm, ids, mask)
        if model is self.model:
            return answers(ids, mask)
        if model is not None and model is not self.ref_model:
            raise ValueError(
                "`model` must be the trainer's `model`, its `ref_model`, or None, which stands for the reference; got "
                f"another {type(model).__name__}."
            )
        reference = self.native_dpo.reference
        if reference is None:
            raise ValueError("The reference was let go of when it had scored the data: ask before `train`.")
        with answers.bound(reference.params(), reference.frozen):
            return answers(ids, mask)

    def compute_reference_log_probs(self, padded_batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Sums (B) of the reference's log-probabilities, chosen and rejected.

        Args:
          padded_batch: Of the collator.
        """
        chosen, rejected, _, _ = self.concatenated_forward(self.ref_model, padded_batch)
        return chosen, rejected

    def dpo_loss(
        self,
        policy_chosen_logps: Any,
        policy_rejected_logps: Any,
        reference_chosen_logps: Any,
        reference_rejected_logps: Any,
        reference_free: bool | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The configured losses of sums of log-probabilities.

        Losses that divide by lengths take the sums as they are: give means where means are wanted.

        Args:
          policy_chosen_logps: log π(y⁺|x) (B), in nats.
          policy_rejected_logps: log π(y⁻|x).
          reference_chosen_logps: log π_ref(y⁺|x).
          reference_rejected_logps: log π_ref(y⁻|x).
          reference_free: Default: the configuration's.
        Returns:
          Losses (B), and the rewards of chosen and rejected.
        """
        config, method = self.flat, self.native_dpo.method
        policy = [jnp.asarray(x, jnp.float32) for x in (policy_chosen_logps, policy_rejected_logps)]
        real = [jnp.asarray(x, jnp.float32) for x in (reference_chosen_logps, reference_rejected_logps)]
        free = config.reference_free if reference_free is None else reference_free
        reference = [jnp.zeros_like(x) for x in real] if free else real
        pairs = pairs_from_logprobs(
            *policy,
            *reference,
            divergence=DIVERGENCES[config.f_divergence_type],
            alpha=config.f_alpha_divergence_coef,
        )
        settings = {
            "beta": config.beta,
            "label_smoothing": config.label_smoothing,
            "discopop_tau": config.discopop_tau,
        }
        losses = sum(
            (w * LOSSES[name](pairs, settings) for name, w in method.terms),
            start=jnp.zeros_like(pairs.chosen),
        )
        rewards = [
            implicit_rewards(now, ref, beta=config.beta) for now, ref in zip(policy, real, strict=True)
        ]
        return losses, rewards[0], rewards[1]

    def get_batch_metrics(
        self, model: Any, batch: Batch, train_eval: Literal["train", "eval"] = "train"
    ) -> tuple[jax.Array, dict[str, float]]:
        """Mean loss of a batch, by every option of the configuration, and its metrics.

        Args:
          model: As for `concatenated_forward`.
          batch: Of the collator.
          train_eval: "eval" puts `eval_` before the names.
        """
        rows, labels, mask = self._rows(batch)
        logits, reference = (
            next_predictions(self._output(one, *rows).logits) for one in (model, self.ref_model)
        )
        whole = Completion(
            ref_logprobs=logprobs_from_logits(reference, labels),
            mask=mask,
            **read_tokens(logits, labels)._asdict(),
        )
        half = len(labels) // 2
        chosen, rejected = (
            jax.tree.map(lambda x, p=part: x[p], whole) for part in (slice(half), slice(half, None))
        )
        out = configured_loss(self.native_dpo.method)(chosen, rejected, jnp.ones(half, bool))
        prefix = "eval_" if train_eval == "eval" else ""
        figures = finalize(out.metrics)
        return out.loss_sum / out.weight, {
            f"{prefix}{name}": value for name, value in figures.items() if name.startswith(_FIGURES)
        }

    get_batch_loss_metrics = get_batch_metrics

    def get_batch_samples(self, model: Any, batch: Batch) -> tuple[list[str], list[str]]:
        """Samples completions of a batch's prompts from policy and reference.

        Args:
          model: The trainer's `model`.
          batch: Of the collator, with `prompt`.
        Returns:
          Prompts with completions, of the policy and of the reference.
        """
        del model
        prompts = list(batch["prompt"])
        native = self.native_dpo
        room = {"max_new_tokens": max(self.max_length - np.asarray(batch["prompt_input_ids"]).shape[1], 1)}
        key = native.draws.key()
        written = native.generate(prompts, gen_kwargs=room, key=key)
        if native.reference is None:
            raise ValueError("The reference was let go of when it had scored the data: ask before `train`.")
        now = native.state
        try:
            native.state = replace(now, train=replace(now.train, params=native.reference.params()))
            of_reference = native.generate(prompts, gen_kwargs=room, key=key)
        finally:
            native.state = now
        return (
            [prompt + text for prompt, text in zip(prompts, written, strict=True)],
            [prompt + text for prompt, text in zip(prompts, of_reference, strict=True)],
        )

    def store_metrics(
        self, metrics: Mapping[str, float], train_eval: Literal["train", "eval"] = "train"
    ) -> None:
        """Keeps figures until `log` is called, which adds their means to its line.

        Args:
          metrics: Name → number.
          train_eval: Which kind of line they belong to; an evaluation's is told by a loss that begins with `eval_`.
        """
        for name, value in metrics.items():
            self._stored[train_eval][name].append(float(value))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds a line to `state.log_history`, with the means of what was stored.

        Args:
          logs: Name → number.
          start_time: Of transformers; no effect.
        """
        kind = "eval" if any(name.startswith("eval_") for name in logs) else "train"
        means = {name: float(np.mean(values)) for name, values in self._stored.pop(kind, {}).items()}
        super().log(logs | means, start_time)

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
        if self._by_collator:
            refuse_stream(records)
            if handle.is_encoder_decoder:
                raise ValueError("`data_collator` must be None for an encoder-decoder, whose rows jrl makes.")
            pad = config.label_pad_token_id
            records = collated_preferences(
                records, self.tokenizer, self.data_collator, label_pad_token_id=pad
            )
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
        named = {
            "loss_type": list(config.loss_type),
            "precompute_ref_log_probs": False if streams else config.precompute_ref_log_probs or None,
            "ref_model_path": self._reference_source(handle),
        }
        return Method(**shared_fields(config, Method) | named)

    def _reference_source(self, handle: ModelHandle) -> Any:
        """Source of a separate reference; None: the policy as it starts is the reference."""
        given, found = self._ref_model, self.flat.ref_model_init_kwargs
        kwargs = found if isinstance(found, dict) else {}
        if given is None:
            self.ref_model = None
            return None
        if isinstance(given, str | os.PathLike):
            self.ref_model = AutoModelForCausalLM.from_pretrained(given, **kwargs)
        else:
            self.ref_model = untrained(resolve_model(given))
        same = same_source(self.ref_model, handle)
        # Beside an adapter that a folder brings, the same folder means base and adapter as they are now.
        return None if same and not is_adapter_folder(handle.source) else self.ref_model.source

    def own_loss(self) -> PairsLoss | None:
        """`dpo_loss`, where a subclass has its own.

        Raises:
          ValueError: If an option is set that jrl's own loss alone reads.
        """
        if not own_methods(self, DPOTrainer, self.TRACED):
            return None
        config = self.flat
        if config.ld_alpha is not None or config.use_weighting:
            name = "use_weighting" if config.use_weighting else "ld_alpha"
            raise ValueError(
                f"`{name}` must not be set where `dpo_loss` is overridden: it belongs to the configured losses."
            )
        return own_pair_loss(self, lambda: self.native_dpo.method)

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

    def _collate(self, records: list[Any]) -> Any:
        """A given collator sees ids, as it does when it decides what is learned."""
        if not self._by_collator:
            return super()._collate(records)
        return self.data_collator(preference_features(records, self.tokenizer))

    def _computed(self, samples: Any) -> dict[str, float]:
        if self.compute_metrics is not None:
            warn_ignored(
                "compute_metrics", "an evaluation of DPO has the metrics of the rewards, and no predictions"
            )
        return {}


def _older_length(args: TrainingArguments | None) -> int | None:
    return args.max_target_length if isinstance(args, DPOConfig) else None
