# SPDX-License-Identifier: Apache-2.0
"""How a trainer of TRL's shape is made: data, then the six sections of a configuration, then jrl's own trainer.

Data are read and tokenised first, so that whatever is wrong with a row is said before a model is loaded. Then the flat
configuration becomes a `TRLConfig`, which jrl's trainer runs on; nothing is computed here.
"""

from __future__ import annotations

import abc
import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import optax
from transformers import TrainingArguments
from transformers.trainer_utils import EvalPrediction

from jrl.data.records import RecordStream, read_records
from jrl.data.streaming import StreamSet
from jrl.distributed import on_main
from jrl.learners.config import MethodConfig
from jrl.models.adapters.config import plain_peft_config
from jrl.trainers.config import TRLConfig
from jrl.trainers.evaluation import Evaluation
from jrl.trainers.offline import OfflineTrainer
from jrl.trainers.sections import ModelConfig, OptimizerConfig, TokenizerConfig
from jrl.trl.arguments import FlatArguments, check_meanings, train_section, word
from jrl.trl.given import Given, flat_copy, untrained, with_classic
from jrl.trl.models import ModelHandle, resolve_model
from jrl.trl.optimization import optimizer_section, scheduler_section
from jrl.trl.parts import flat_max_length, flat_tokenizer, given_optimizer
from jrl.trl.watching import Names, Watcher, best_name, make_callback
from jrl.trlx.ignored import warn_ignored

Records = Any
_Evaluations = dict[str, Any]
TRAINING = "train_dataset"
MAIN = ""
"""Name of the evaluation data where there is one set of them."""


class FlatBase(abc.ABC):
    """A trainer of TRL's shape.

    Attributes:
      args: The configuration, as it was given.
      model: The model's handle; it saves and samples with the parameters as they are now.
      tokenizer: A copy of the tokenizer, with its padding; `processing_class` is the same.
      train_dataset: As it was given.
      eval_dataset: As it was given.
      data_collator: Makes the batches of the loaders.
      state: transformers' `TrainerState`: `global_step`, `epoch`, `log_history`, `best_metric`.
      native: jrl's own trainer, with `history`, `run_dir` and `config`.
    """

    config_class: ClassVar[type[FlatArguments]]
    native_class: ClassVar[type[OfflineTrainer]]
    model_class: ClassVar[type[ModelHandle]]
    NAMES: ClassVar[Names]
    """jrl's metric → TRL's."""

    def __init__(self, given: Given, **classic: Any) -> None:
        args = self.config_class() if given.args is None else given.args
        if not isinstance(args, TrainingArguments):
            raise TypeError(
                f"`args` must be a {self.config_class.__name__} or transformers' TrainingArguments, got "
                f"{type(args).__name__}."
            )
        check_meanings(args, self.config_class.MEANINGS)
        self.args = args
        self.config = with_classic(flat_copy(args, self.config_class), classic)
        self.model_init, self.compute_metrics = given.model_init, given.compute_metrics
        self.preprocess_logits_for_metrics = given.preprocess_logits_for_metrics
        self.train_dataset, self.eval_dataset = given.train_dataset, given.eval_dataset
        handle = self._handle(given)
        self.tokenizer = flat_tokenizer(self.config, given.tokenizer, handle)
        self.max_length = flat_max_length(self.config, handle)
        self.data_collator = self._collator(given.data_collator)
        if given.train_dataset is None and given.eval_dataset is None:
            raise ValueError(
                "`train_dataset` or `eval_dataset` must be given: there is nothing to learn from."
            )
        if given.eval_dataset is None and self.config.eval_strategy != "no":
            raise ValueError(
                f"`eval_dataset` must be given where `eval_strategy` is {word(self.config.eval_strategy)!r}, got None."
            )
        self._samples = None if given.train_dataset is None else self._read(given.train_dataset, handle)
        self._eval_samples: _Evaluations = self._read_evaluations(given.eval_dataset, handle)
        self._check_best()
        self._watcher = Watcher(args, given.callbacks or (), self.NAMES, self.native_class.tokens_metric)
        self.native = self._make_native(handle, given_optimizer(self.config, given))
        for one in (self._named, handle):  # the script's own handle saves what was trained, too
            one.attach(self.native)
        self.model = handle
        self._watcher.given |= {
            "model": handle,
            "processing_class": self.tokenizer,
            "tokenizer": self.tokenizer,
            "optimizer": None,
            "lr_scheduler": None,
        }
        self._training = False
        self._watcher.event("on_init_end")

    # What differs between the three.

    @abc.abstractmethod
    def _make_samples(self, records: Any, handle: ModelHandle, *, evaluation: bool) -> Any:
        """Tokenised samples of records."""

    @abc.abstractmethod
    def _method(self, handle: ModelHandle) -> MethodConfig:
        """The method's section."""

    @abc.abstractmethod
    def _collator(self, given: Any) -> Callable[[list[Any]], Any]:
        """What makes the batches of the loaders: that which was given, or the default one."""

    def _before_learning(self) -> None:  # noqa: B027 (two of three have nothing to do here)
        """Called once, before the first step."""

    def _prediction(self, samples: Any) -> EvalPrediction | None:
        """What `compute_metrics` gets; None where this trainer predicts nothing."""
        del samples
        return None

    # What a trainer is made of.

    @property
    def processing_class(self) -> Any:
        """The tokenizer."""
        return self.tokenizer

    @property
    def state(self) -> Any:
        """transformers' `TrainerState`."""
        return self._watcher.state

    @property
    def control(self) -> Any:
        """transformers' `TrainerControl`."""
        return self._watcher.control

    @property
    def callbacks(self) -> list[Any]:
        """The callbacks."""
        return self._watcher.callbacks

    def add_callback(self, callback: Any) -> None:
        """One callback more: an object or a class of transformers' `TrainerCallback`."""
        self._watcher.callbacks.append(make_callback(callback))

    def _handle(self, given: Given) -> ModelHandle:
        """The model that was given, or that `model_init` makes, with the adapter that is to train."""
        model = given.model
        if model is None and given.model_init is not None:
            model = given.model_init()
        if model is None:
            raise ValueError("`model` must be given, or `model_init`, a function that makes it.")
        kwargs = dict(vars(self.config)["model_init_kwargs"] or {})
        if isinstance(model, str | os.PathLike):
            found: ModelHandle = self.model_class.from_pretrained(model, **kwargs)  # type: ignore[attr-defined]
        else:
            if kwargs:
                warn_ignored("model_init_kwargs", "the model is there already")
            found = resolve_model(model)
        self._named = untrained(found, "model")
        if given.peft_config is None:
            return found
        if found.is_peft_model:
            raise ValueError(
                "`peft_config` must be None for a model that has an adapter already: that one trains on. To begin a "
                "fresh one, merge the old one first (`save_pretrained(folder, merge_adapter=True)`)."
            )
        return dataclasses.replace(found, peft_config=plain_peft_config(given.peft_config))

    def _read(self, dataset: Any, handle: ModelHandle, *, name: str = TRAINING) -> Any:
        """Samples of a data set; errors call it by the name of the argument."""
        evaluation = name != TRAINING
        try:
            records = read_records(dataset)
            if evaluation and isinstance(records, RecordStream):
                raise ValueError("evaluations go over all rows, so give a list of them, got a stream.")
        except ValueError as error:
            raise ValueError(f"`{name}`: {error}") from error
        try:
            return self._make_samples(records, handle, evaluation=evaluation)
        except ValueError as error:
            raise ValueError(str(error).replace("`samples`", f"`{name}`", 1)) from error

    def _read_evaluations(self, dataset: Any, handle: ModelHandle) -> _Evaluations:
        """Name → samples; one set alone has the name ''."""
        if dataset is None:
            return {}
        if not isinstance(dataset, Mapping):
            return {MAIN: self._read(dataset, handle, name="eval_dataset")}
        return {
            name: self._read(found, handle, name=f"eval_dataset[{name!r}]") for name, found in dataset.items()
        }

    def _check_best(self) -> None:
        """Refuses a metric that no evaluation has, as far as that is known before one: what a function of the script
        will compute is not."""
        best, sets = best_name(self.config), [name for name in self._eval_samples if name != MAIN]
        names = {*self.NAMES.values(), *(f"{one}_{name}" for one in sets for name in self.NAMES.values())}
        if best is not None and self.compute_metrics is None and best.removeprefix("eval_") not in names:
            raise ValueError(
                f"`metric_for_best_model` must be one of {sorted(names)}, got {self.config.metric_for_best_model!r}."
            )

    def _make_native(
        self, handle: ModelHandle, optimizer: optax.GradientTransformation | None
    ) -> OfflineTrainer:
        """jrl's trainer, with model and data."""
        config = self._native_config(handle, given_optimizer=optimizer is not None)
        try:
            Path(config.train.checkpoint_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"`output_dir` must be a folder to write to, got {config.train.checkpoint_dir}: {error.strerror}."
            ) from error
        on_main(
            lambda: [str(file) for file in self.tokenizer.save_pretrained(config.tokenizer.tokenizer_path)]
        )
        made: Any = type(self.native_class.__name__, (Watched, self.native_class), {"owner": self})
        native: OfflineTrainer = made(config, optimizer=optimizer)
        if self._samples is not None:
            native.samples = self._samples
        native.eval_samples = next(iter(self._eval_samples.values()), None)
        return native

    def _native_config(self, handle: ModelHandle, *, given_optimizer: bool) -> TRLConfig:
        """The six sections."""
        config = self.config
        train = train_section(
            config,
            trainer=self.native_class.__name__,
            seq_length=self.max_length,
            num_rows=self._num_rows(),
            mesh=config.mesh if isinstance(config.mesh, dict) else None,
        )
        if handle.compute_dtype == "bfloat16" and config.bf16 is None:
            train.compute_dtype = "bfloat16"
        optimizer = (
            OptimizerConfig("adamw", {"lr": config.learning_rate})
            if given_optimizer
            else optimizer_section(config)
        )
        return TRLConfig(
            method=self._method(handle),
            model=ModelConfig(
                model_path=handle.source,
                model_arch_type=handle.arch_type,  # type: ignore[arg-type]
                peft_config=handle.peft_config,
                frozen_dtype=handle.frozen_dtype,  # type: ignore[arg-type]
                attn_implementation=handle.attn_implementation,
                model_extra_configs=dict(handle.model_extra_configs),
            ),
            optimizer=optimizer,
            scheduler=scheduler_section(config, train.total_steps, ratio=config.warmup_ratio),
            tokenizer=TokenizerConfig(
                tokenizer_path=str(Path(config.output_dir or ".") / "tokenizer"),
                padding_side=self.tokenizer.padding_side,
                truncation_side=self.tokenizer.truncation_side,
            ),
            train=train,
        )

    def _num_rows(self) -> int | None:
        """Rows of a pass; None: not known. A trainer that only evaluates has one."""
        if self._samples is None:
            return 1
        return None if isinstance(self._samples, StreamSet) else len(self._samples)

    @abc.abstractmethod
    def run_evaluation(self, step: int, measure: Callable[[int], Evaluation | None]) -> Evaluation | None:
        """What jrl's trainer asks for between two steps.

        Args:
          step: Optimizer step.
          measure: jrl's own evaluation.
        """


class Watched(OfflineTrainer):
    """One of jrl's trainers whose evaluations go through the trainer of TRL's shape that owns it."""

    owner: ClassVar[FlatBase]

    def run_evaluation(self, step: int) -> Evaluation | None:
        """The owner's, which asks for jrl's own."""
        return self.owner.run_evaluation(step, super().run_evaluation)
