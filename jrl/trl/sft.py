# SPDX-License-Identifier: Apache-2.0
"""TRL's trainer of supervised fine-tuning, over jrl's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, cast

import jax.numpy as jnp
import numpy as np
from transformers import TrainingArguments
from transformers.trainer_utils import EvalPrediction

from jrl.data.demonstrations import IGNORED_LABEL, DemonstrationFormat, DemonstrationSet, DialogueRow
from jrl.data.sources import RecordStream
from jrl.interop import TrainedModel, own_methods, warn_ignored
from jrl.learners.accumulate import Loss
from jrl.learners.sft import SFTConfig as Method
from jrl.learners.sft import sft_objective
from jrl.losses.sft import LOSSES
from jrl.ops.alignment import next_tokens
from jrl.trainers.policy_trainer import PolicyTrainer
from jrl.trainers.sft import SFTTrainer as Native
from jrl.trainers.sft_data import make_samples
from jrl.trl.arguments import FlatArguments
from jrl.trl.configs import SFTConfig
from jrl.trl.constant_length import ConstantLengthDataset
from jrl.trl.constructor_arguments import Given, shared_fields
from jrl.trl.flat_trainer import TRAINING, FlatTrainer
from jrl.trl.models import AutoModelForCausalLM, ModelHandle
from jrl.trl.own_losses import TracedModel, own_objective, refuse_options, token_inputs, token_loss_of
from jrl.trl.refusals import SFT
from jrl.trl.row_texts import Text, one_text
from jrl.trl.run_state import Names
from jrl.trl.token_predictions import labelled, predict_tokens
from jrl.typing import Frozen, Params, Sequences

__all__ = ["SFTTrainer"]

# Arguments of the older constructor that pack by characters, and their defaults there.
_BY_CHARACTERS = {
    "infinite": False,
    "num_of_sequences": 1024,
    "chars_per_token": 3.6,
    "dataset_batch_size": 1000,
}
_WHY = "rows are packed and tokenised by tokens, and passes follow one another as long as the run lasts"


class SFTTrainer(FlatTrainer):
    """Learns texts, dialogues and completions.

    A subclass may override `compute_loss`, from which the run then learns, and `log`. Other methods of transformers'
    `Trainer` are refused where nothing would call them.

    Args:
      model: A name, a folder, a handle of `from_pretrained`, or what else `resolve_model` takes.
      args: An `SFTConfig`, or transformers' `TrainingArguments`.
      data_collator: `DataCollatorForCompletionOnlyLM`, or another that makes `labels` of rows with `input_ids`: it
        decides what is learned.
      train_dataset: Rows with a text, `messages`, `prompt` and `completion`, or `input_ids`; or a
        `ConstantLengthDataset`.
      eval_dataset: The same, or several sets by name.
      tokenizer: Default: that of the model's folder.
      model_init: Makes the model where `model` is None.
      compute_metrics: Gets logits (N T V), padded with −100, and labels (N T).
      callbacks: Of transformers.
      optimizers: (an optax transformation, None), or (None, a function from the step to the learning rate).
      preprocess_logits_for_metrics: `(logits, labels) -> predictions`, called batch by batch: take what
        `compute_metrics` needs here, or all logits of the evaluation are kept.
      peft_config: An adapter trains, and the model is frozen.
      dataset_text_field: As in the configuration; beside a `formatting_func` it wins.
      packing: As in the configuration.
      formatting_func: Makes the text of a row; the older form, from lists of columns to a list of texts, is known by
        its list.
      max_seq_length: As `max_length` of the configuration.
      infinite: No effect.
      num_of_sequences: No effect.
      chars_per_token: No effect.
      dataset_num_proc: As in the configuration.
      dataset_batch_size: No effect.
      neftune_noise_alpha: As in the configuration.
      model_init_kwargs: As in the configuration.
      dataset_kwargs: As in the configuration.
      processing_class: The tokenizer under its newer name.
      optimizer_cls_and_kwargs: A function that makes an optax transformation, and its arguments.
    """

    config_class: ClassVar[type[FlatArguments]] = SFTConfig
    native_class = Native
    model_class = AutoModelForCausalLM
    TRACED = ("compute_loss",)
    REFUSED = SFT
    TAGS = ("trl", "sft")
    NAMES: ClassVar[Names] = {
        "sft/loss": "loss",
        "sft/entropy": "entropy",
        "sft/token_accuracy": "mean_token_accuracy",
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
        peft_config: Any = None,
        dataset_text_field: str | None = None,
        packing: bool = False,
        formatting_func: Callable[[Any], Any] | None = None,
        max_seq_length: int | None = None,
        infinite: bool = False,
        num_of_sequences: int = 1024,
        chars_per_token: float = 3.6,
        dataset_num_proc: int | None = None,
        dataset_batch_size: int = 1000,
        neftune_noise_alpha: float | None = None,
        model_init_kwargs: dict[str, Any] | None = None,
        dataset_kwargs: dict[str, Any] | None = None,
        processing_class: Any = None,
        optimizer_cls_and_kwargs: tuple[Callable[..., Any], Mapping[str, Any]] | None = None,
    ) -> None:
        given = Given.of(locals())
        self.infinite, self.num_of_sequences = infinite, num_of_sequences
        self.chars_per_token, self.dataset_batch_size = chars_per_token, dataset_batch_size
        for name, default in _BY_CHARACTERS.items():
            if vars(self)[name] not in (None, default):
                warn_ignored(f"SFTTrainer({name}=)", _WHY)
        # Beside the field, the function is not asked.
        self.formatting_func = None if dataset_text_field is not None else formatting_func
        self._by_collator = data_collator is not None
        super().__init__(
            given,
            dataset_text_field=dataset_text_field,
            packing=packing or None,
            max_length=max_seq_length if max_seq_length is not None else _older_length(args),
            dataset_num_proc=dataset_num_proc,
            neftune_noise_alpha=neftune_noise_alpha,
            model_init_kwargs=model_init_kwargs,
            dataset_kwargs=dataset_kwargs,
        )

    @property
    def flat(self) -> SFTConfig:
        """The configuration with the constructor's arguments."""
        return cast(SFTConfig, self.config)

    @property
    def dataset_text_field(self) -> str:
        """The column of texts."""
        return self.flat.dataset_text_field

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The configured loss of rows; a run learns from a subclass's own.

        Args:
          model: `(input_ids, attention_mask)` → an output with `logits` (B, L, V).
          inputs: `input_ids`, `attention_mask` and `labels` (B, L).
          return_outputs: Whether to return the model's output as well.
          num_items_in_batch: Of transformers; no effect.
        Returns:
          The mean over the labels that are not −100, or a pair of it and the output.
        """
        del num_items_in_batch
        output = model(inputs["input_ids"], inputs["attention_mask"])
        kind = "dft" if self.flat.loss_type == "dft" else "nll"
        loss = token_loss_of(jnp.asarray(output.logits), jnp.asarray(inputs["labels"]), LOSSES[kind])
        return (loss, output) if return_outputs else loss

    def own_objective(self) -> Callable[[Params, Frozen, Any], Loss] | None:
        """`compute_loss`, where a subclass has its own.

        Raises:
          ValueError: If rows are packed, or embeddings get noise.
        """
        if not own_methods(self, SFTTrainer, self.TRACED):
            return None
        refuse_options(self, packing=self.flat.packing, neftune_noise_alpha=self.flat.neftune_noise_alpha)
        return self._objective

    def _objective(self, params: Params, frozen: Frozen, batch: Sequences) -> Loss:
        native, answers = cast(Native, self.native), self._answers
        if batch.inputs.context_tokens is not None:
            raise ValueError(
                f"`{type(self).__name__}.compute_loss` must be that of a decoder: an encoder-decoder learns by jrl's "
                "own loss alone."
            )
        inputs = token_inputs(batch)
        with answers.bound(params, frozen):
            return own_objective(
                self,
                TracedModel(lambda ids, mask: answers(ids, mask).logits, self.model, with_labels=True),
                inputs,
                next_tokens(inputs["labels"]) != IGNORED_LABEL,
                "sft/loss",
                sft_objective(
                    native.reader,
                    params,
                    frozen,
                    batch,
                    token_loss=LOSSES[native.method.loss_type],
                ),
            )

    def _read(self, dataset: Any, handle: ModelHandle, *, name: str = TRAINING) -> Any:
        if isinstance(dataset, ConstantLengthDataset) and not dataset.infinite:
            dataset = list(dataset)  # it has an end, so it need not be a stream
        return super()._read(dataset, handle, name=name)

    def _make_samples(self, records: Any, handle: ModelHandle, *, evaluation: bool) -> Any:
        config = self.flat
        packs = config.packing if not evaluation or config.eval_packing is None else config.eval_packing
        if packs and self._by_collator:
            raise ValueError("`packing` must be False with a `data_collator`, which sees one sample a row.")
        if self._by_collator:
            return self._relabelled(records)
        return make_samples(
            records,
            self.tokenizer,
            self._method(handle),
            packing=packs,
            max_length=self.max_length,
            seed=config.seed,
            decoder_start_token_id=handle.config.decoder_start_token_id
            if handle.is_encoder_decoder
            else None,
            text_field=config.dataset_text_field,
            formatting_fn=self._formatting_fn,
            append_eos=self._appends_eos,
            num_proc=config.dataset_num_proc,
        )

    @property
    def _formatting_fn(self) -> Text | None:
        return None if self.formatting_func is None else one_text(self.formatting_func)

    @property
    def _appends_eos(self) -> bool:
        """True where texts are ended with EOS, as `dataset_kwargs` says."""
        options = self.flat.dataset_kwargs or {}
        known = {"append_concat_token", "add_special_tokens", "skip_prepare_dataset"}
        if not isinstance(options, Mapping) or options.keys() - known:
            raise ValueError(f"`dataset_kwargs` must be a dict of {sorted(known)}, got {options!r}.")
        return bool(options.get("append_concat_token", True))

    def _format(self) -> DemonstrationFormat:
        """Format in which rows are read."""
        config = self.flat
        return DemonstrationFormat(
            tokenizer=self.tokenizer,
            max_length=self.max_length,
            text_field=config.dataset_text_field,
            formatting_fn=self._formatting_fn,
            completion_only_loss=config.completion_only_loss,
            assistant_only_loss=config.assistant_only_loss,
            append_eos=self._appends_eos,
        )

    def _relabelled(self, records: Any) -> DemonstrationSet:
        """The rows with what the collator learns of them."""
        if isinstance(records, RecordStream):
            raise ValueError("`data_collator` needs a list of rows here, got a stream.")
        rows, seed = self._format(), self.config.seed
        found = DemonstrationSet(list(records), rows, seed=seed, num_proc=self.flat.dataset_num_proc)
        labelled = []
        for row in found.rows:
            batch = self.data_collator([_feature(row)])
            labels = np.asarray(batch["labels"])[0]
            if "attention_mask" in batch:  # padding may stand on either side
                labels = labels[np.asarray(batch["attention_mask"])[0] != 0]
            labelled.append({"input_ids": row.tokens, "labels": labels[: len(row.tokens)].tolist()})
        return DemonstrationSet(labelled, replace(rows, formatting_fn=None), seed=seed)

    def _method(self, handle: ModelHandle) -> Method:
        config = self.flat
        loss_type = "dft" if config.loss_type == "dft" else _nll(config.loss_type)
        return Method(**shared_fields(config, Method) | {"loss_type": loss_type})

    def _collator(self, given: Any) -> Callable[[list[Any]], Any]:
        return self._collate_text if given is None else cast(Callable[[list[Any]], Any], given)

    def _collate(self, records: list[Any]) -> Any:
        """A given collator sees ids, as it does when it decides what is learned."""
        if not self._by_collator:
            return super()._collate(records)
        rows = self._format()
        found = [rows.encode(record, number) for number, record in enumerate(records)]
        return self.data_collator([_feature(row) for row in found if row is not None])

    def _collate_text(self, records: list[Any]) -> dict[str, np.ndarray]:
        """`input_ids`, `attention_mask` and `labels` (B L) of rows, as they are learned."""
        rows = self._format()
        found = [rows.encode(record, number) for number, record in enumerate(records)]
        kept = [row for row in found if row is not None]
        tokens, mask, labels = labelled(kept, pad_token_id=self.tokenizer.pad_token_id)
        return {"input_ids": tokens, "attention_mask": mask.astype(np.int32), "labels": labels}

    def _prediction(self, samples: Any) -> EvalPrediction:
        """Logits and labels, or what `preprocess_logits_for_metrics` takes of them."""
        return predict_tokens(
            self._answers,
            samples,
            batch_size=self.args.per_device_eval_batch_size,
            pad_token_id=self.tokenizer.pad_token_id,
            preprocess=self.preprocess_logits_for_metrics,
        )

    @cached_property
    def _answers(self) -> TrainedModel:
        """Model for all evaluations: a shared one compiles once for each shape."""
        return TrainedModel(cast(PolicyTrainer, self.native))


def _feature(row: DialogueRow) -> dict[str, list[int]]:
    """A row as collators take it."""
    return {"input_ids": row.tokens, "attention_mask": [1] * len(row.tokens)}


def _older_length(args: TrainingArguments | None) -> int | None:
    return args.max_seq_length if isinstance(args, SFTConfig) else None


def _nll(loss_type: str | None) -> str:
    if loss_type in (None, "nll", "chunked_nll"):
        return "nll"
    raise ValueError(f"`loss_type` must be one of nll, chunked_nll, dft or None, got {loss_type!r}.")
