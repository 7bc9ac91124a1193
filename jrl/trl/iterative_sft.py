# SPDX-License-Identifier: Apache-2.0
"""TRL's step-by-step supervised fine-tuning: a script brings the rows of every step. The update is jrl's own."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, cast

import jax
import numpy as np
from transformers import TrainingArguments
from transformers.trainer_utils import EvalPrediction

from jrl.data.demonstrations import IGNORED_LABEL, CompletionSet
from jrl.data.sources import read_records
from jrl.data.tokenizer import check_ids, count_ids
from jrl.interop import warn_ignored
from jrl.ops.metrics import finalize
from jrl.trainers.base import TRAINING_STREAM
from jrl.trainers.sft import SFTTrainer as Native
from jrl.trainers.sft_data import SFTSamples
from jrl.trl.arguments import word
from jrl.trl.constructor_arguments import Given
from jrl.trl.generation import as_row
from jrl.trl.handles import ModelHandle, say_untrained
from jrl.trl.refusals import ITERATIVE
from jrl.trl.run_state import Window
from jrl.trl.sft import SFTTrainer
from jrl.trl.step_records import WatchedHistory

__all__ = ["IterativeSFTTrainer"]

_COLUMNS = ("input_ids", "attention_mask", "labels", "texts", "texts_labels")


class IterativeSFTTrainer(SFTTrainer):
    """Learns what each call of `step` brings, one optimizer step a batch.

    `max_steps` of the configuration is the length of the schedule; checkpoints are not written: `save_model` is there.
    As of `SFTTrainer` a subclass may override `compute_loss` and `log`.

    Args:
      model: As of `SFTTrainer`.
      args: Likewise, with `max_steps`, unless the learning rate is constant.
      tokenizer: Likewise.
      optimizers: Likewise.
      data_collator: Likewise.
      eval_dataset: Likewise; measured every `eval_steps` where `eval_strategy` says so, and by `evaluate`.
      max_length: Most tokens of a row.
      truncation_mode: What longer rows keep: "keep_end" or "keep_start".
      preprocess_logits_for_metrics: As of `SFTTrainer`.
      compute_metrics: Likewise.
      optimize_device_cache: No effect: nothing is cached between steps.
      peft_config: As of `SFTTrainer`.
      processing_class: The tokenizer under its newer name.
    Raises:
      ValueError: If the schedule has no length.
    """

    NEEDS_ROWS = False
    REFUSED = ITERATIVE

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        tokenizer: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
        data_collator: Callable[[list[Any]], Any] | None = None,
        eval_dataset: Any = None,
        max_length: int | None = None,
        truncation_mode: str = "keep_end",
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        compute_metrics: Callable[[EvalPrediction], Mapping[str, Any]] | None = None,
        optimize_device_cache: bool = False,
        peft_config: Any = None,
        processing_class: Any = None,
    ) -> None:
        if optimize_device_cache:
            warn_ignored("IterativeSFTTrainer(optimize_device_cache=)", "nothing is cached between steps")
        self.truncation_mode = truncation_mode
        super().__init__(
            model,
            args,
            data_collator,
            eval_dataset=eval_dataset,
            tokenizer=tokenizer,
            compute_metrics=compute_metrics,
            optimizers=optimizers,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            peft_config=peft_config,
            max_seq_length=max_length,
            processing_class=processing_class,
        )
        train = self.native.config.train
        self._records = WatchedHistory(self.native.history, watch=train.watch)
        self._per_pass = train.total_steps  # no data set here, so no length of a pass
        self._watcher.begin(
            max_steps=train.total_steps,
            per_pass=train.total_steps,
            batch_size=train.batch_size,
            records=lambda: [],
        )

    def _handle(self, given: Given) -> ModelHandle:
        """The model, once the configuration is seen to fit."""
        schedule, steps = word(self.config.lr_scheduler_type), self.config.max_steps
        if steps <= 0 and schedule != "constant" and not given.brings_optimizer:
            raise ValueError(
                "`max_steps` must be the number of optimizer steps of all calls of `step`, since `lr_scheduler_type` "
                f"is {schedule!r}; got {steps}. Or set `lr_scheduler_type='constant'`."
            )
        vars(self.config)["truncation_mode"] = self.truncation_mode  # which the tokenizer is made by
        return super()._handle(given)

    def train(self, resume_from_checkpoint: str | bool | None = None) -> NoReturn:
        """Refused: `step` is what learns.

        Raises:
          ValueError: Always.
        """
        del resume_from_checkpoint
        raise ValueError("IterativeSFTTrainer learns in `step`; SFTTrainer trains on a data set.")

    def step(
        self,
        input_ids: Sequence[Any] | None = None,
        attention_mask: Sequence[Any] | None = None,
        labels: Sequence[Any] | None = None,
        texts: Sequence[str] | None = None,
        texts_labels: Sequence[str] | None = None,
    ) -> dict[str, float]:
        """Makes a pass over these rows: an optimizer step for every batch of them.

        Args:
          input_ids: Ids of each row; of an encoder-decoder what the encoder reads.
          attention_mask: 0 on padding; None: there is none.
          labels: What is learned, −100 elsewhere: of a decoder the ids themselves (None: all), of an encoder-decoder
            what its decoder writes.
          texts: Instead of ids; a decoder's are ended with EOS.
          texts_labels: What an encoder-decoder writes for each text; a decoder learns its `texts`.
        Returns:
          Means over the steps: `loss` and what else a run logs.
        Raises:
          TypeError: If a method was put on the trainer that the compiled update does not see.
          ValueError: Naming the argument and the row that cannot be used. Nothing has been computed then.
        """
        self._check_assigned()
        samples = self._rows_of(input_ids, attention_mask, labels, texts, texts_labels)
        native, size = cast(Native, self.native), self.native.config.train.batch_size
        if self.state.global_step == 0:
            say_untrained(self.model, "trainer.save_model(folder)")
        window, root_key = Window(self._watcher.names), jax.random.fold_in(native.root_key, TRAINING_STREAM)
        for number in range(math.ceil(len(samples) / size)):
            batch, before = samples.batch(number, size), self.state.global_step
            with jax.set_mesh(native.mesh):
                key = jax.random.fold_in(root_key, before)
                native.state, metrics = native.update(native.state, native.frozen, native.place(batch), key)
            step = before + 1
            found = {native.tokens_metric: native.count_tokens(batch), **finalize(jax.device_get(metrics))}
            record = {"step": step, "iteration": step, **found}
            self._records.add(record)
            window.add(record)
            self._watcher.record(record)
            every = native.config.train.eval_interval
            if self._eval_samples and every and step % every == 0 and self._evaluates_at(step):
                self.evaluate()
        return window.take()

    def _rows_of(self, *given: Any) -> SFTSamples:
        """Rows of the arguments of `step`."""
        columns = self._columns(dict(zip(_COLUMNS, given, strict=True)))
        named = "texts" if "texts" in columns else "input_ids"
        start = cast(Native, self.native).lm.decoder_start_token_id
        try:
            if start is not None and named == "input_ids":
                return self._of_ids(columns, start)
            return self._make_samples(
                read_records(self._records_of(columns, start)), self.model, evaluation=False
            )
        except ValueError as error:
            raise ValueError(str(error).replace("`samples`", f"`{named}`", 1)) from error

    def _columns(self, given: dict[str, Any]) -> dict[str, list[Any]]:
        """The arguments that count, as lists of one length."""
        found = {name: value for name, value in given.items() if value is not None}
        if "texts" in found and found.keys() & {"input_ids", "attention_mask", "labels"}:
            warnings.warn("`texts` are given, and ids beside them: the ids are not used.", stacklevel=4)
            found = {name: value for name, value in found.items() if name in ("texts", "texts_labels")}
        name = "texts" if "texts" in found else "input_ids"
        if name not in found:
            raise ValueError("`step` must be given `input_ids` or `texts`.")
        for column, values in found.items():
            if isinstance(values, str | Mapping) or not hasattr(values, "__len__"):
                raise ValueError(f"`{column}` must be a list of rows, got {type(values).__name__}.")
            if len(values) != len(found[name]) or not len(values):
                raise ValueError(
                    f"`{column}` must have one entry a row of `{name}`, at least one; got {len(values)} for "
                    f"{len(found[name])}."
                )
        for column in ("texts", "texts_labels"):
            wrong = [row for row, text in enumerate(found.get(column, ())) if not isinstance(text, str)]
            if wrong:
                got = type(found[column][wrong[0]]).__name__
                raise ValueError(f"`{column}[{wrong[0]}]` must be a text, got {got}.")
        target = "texts_labels" if name == "texts" else "labels"
        if self.model.is_encoder_decoder and target not in found:
            raise ValueError(f"`{target}` must be given: an encoder-decoder writes them.")
        return {column: list(values) for column, values in found.items()}

    def _records_of(self, columns: dict[str, list[Any]], start: int | None) -> list[dict[str, Any]]:
        """Records as `SFTTrainer` reads them."""
        if "texts" in columns and start is not None:
            pairs = zip(columns["texts"], columns["texts_labels"], strict=True)
            return [{"prompt": text, "completion": target} for text, target in pairs]
        if "texts" in columns:
            for row, (text, target) in enumerate(
                zip(columns["texts"], columns.get("texts_labels", columns["texts"]), strict=True)
            ):
                if text != target:
                    raise ValueError(
                        f"`texts_labels[{row}]` must be its text, which is what a decoder learns: to learn a part of "
                        "it, give `input_ids` and `labels` with -100."
                    )
            return [{self.dataset_text_field: text} for text in columns["texts"]]
        names = ("input_ids", "attention_mask", "labels")
        kept = {name: [as_row(row, name) for row in columns[name]] for name in names if name in columns}
        records = [dict(zip(kept, values, strict=True)) for values in zip(*kept.values(), strict=True)]
        for row, record in enumerate(records):
            _check_labels(record, row)
        return records

    def _of_ids(self, columns: dict[str, list[Any]], start: int) -> CompletionSet:
        """Rows of an encoder-decoder: what it reads and what it writes."""
        num_ids, side = count_ids(self.tokenizer), -1 if self.truncation_mode == "keep_end" else 1
        masks = columns.get("attention_mask", [None] * len(columns["input_ids"]))
        read, written = [], []
        for row, (ids, mask, labels) in enumerate(
            zip(columns["input_ids"], masks, columns["labels"], strict=True)
        ):
            tokens = as_row(ids, "input_ids")
            real = [True] * len(tokens) if mask is None else [bool(one) for one in np.asarray(mask)]
            tokens = [token for token, keep in zip(tokens, real, strict=True) if keep]
            target = [label for label in as_row(labels, "labels") if label != IGNORED_LABEL]
            if not tokens or not target:
                raise ValueError(f"`input_ids` and `labels` of row {row} must not be empty.")
            read.append(_cut(check_ids(tokens, "input_ids", row, num_ids), self.max_length, side))
            written.append(_cut(check_ids(target, "labels", row, num_ids), self.max_length - 1, side))
        return CompletionSet(
            read,
            written,
            pad_token_id=self.tokenizer.pad_token_id,
            max_length=self.max_length,
            seed=self.config.seed,
            decoder_start_token_id=start,
        )


def _cut(row: list[int], length: int, side: int) -> list[int]:
    """Cuts a row to so many ids: the last ones (−1) or the first ones (1)."""
    return row[-length:] if side < 0 else row[:length]


def _check_labels(record: Mapping[str, Any], row: int) -> None:
    """A decoder's labels are its ids, or −100.

    Raises:
      ValueError: If one is another id.
    """
    if "labels" not in record or len(record["labels"]) != len(record["input_ids"]):
        return  # the reader says which column is too short
    real = record.get("attention_mask", [1] * len(record["labels"]))
    for place, (token, label, counts) in enumerate(
        zip(record["input_ids"], record["labels"], real, strict=False)
    ):
        if counts and label not in (token, IGNORED_LABEL):
            raise ValueError(
                f"`labels` of row {row} must be the ids of `input_ids`, or -100, got {label} for {token} at {place}: a "
                "decoder learns its own row."
            )
