# SPDX-License-Identifier: Apache-2.0
"""A trainer of TRL's shape: made of a flat configuration, run, evaluated and saved, over jrl's own trainer.

Data are read and tokenised first, so that whatever is wrong with a row is said before a model is loaded. Then the flat
configuration becomes a `TRLConfig`, which jrl's trainer runs on; nothing is computed here.
"""

from __future__ import annotations

import abc
import dataclasses
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, cast

from transformers import TrainingArguments
from transformers.trainer_utils import (
    EvalPrediction,
    IntervalStrategy,
    PredictionOutput,
    SaveStrategy,
    TrainOutput,
)

from jrl.data.sources import RecordStream, StreamSet, read_records
from jrl.distributed import on_main
from jrl.interop import jrl_class, own_methods, refuse_overrides, warn_ignored
from jrl.learners.accumulate import Loss
from jrl.learners.config import MethodConfig
from jrl.learners.dpo import PairsLoss
from jrl.models.adapters import plain_peft_config
from jrl.trainers.checkpoints import STATE, CheckpointError, checkpoints_in, read_state
from jrl.trainers.config import ModelConfig, OptimizerConfig, TokenizerConfig, TRLConfig
from jrl.trainers.loop import Hooks, says_what_takes_long
from jrl.trainers.offline import HELD_OUT, OfflineTrainer
from jrl.trainers.rollouts import Evaluation
from jrl.trl.arguments import FlatArguments, check_meanings, train_section, word
from jrl.trl.checkpoint_names import behind_link, drop_links, link_model
from jrl.trl.constructor_arguments import Given, flat_copy, flat_max_length, flat_tokenizer, with_classic
from jrl.trl.handles import resolve_model, say_untrained, untrained
from jrl.trl.models import ModelHandle
from jrl.trl.optimization import given_optimizer, optimizer_section, scheduler_section
from jrl.trl.refusals import IN_A_RUN, TRAINER
from jrl.trl.run_state import Names, Watcher, best_name, translated
from jrl.trl.trainer_surface import TrainerSurface
from jrl.typing import Frozen, Params

_Evaluations = dict[str, Any]
TRAINING = "train_dataset"
# What errors of checkpoints speak of → the argument here.
_FLAT_NAMES = {
    "train.resume_from_checkpoint": "resume_from_checkpoint",
    "train.checkpoint_dir": "output_dir",
    "`train.save_optimizer` was false": "`save_only_model` was True",
}
_STRATEGIES = {"evaluate": "eval_strategy", "save_model": "save_strategy"}
MAIN = ""
"""Name of the evaluation data where there is one set of them."""


class FlatTrainer(TrainerSurface, abc.ABC):
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
    TAGS: ClassVar[tuple[str, ...]]
    """What TRL tags this trainer's models with."""
    NEEDS_ROWS: ClassVar[bool] = True
    """Whether it must be given rows when it is made."""
    TRACED: ClassVar[Sequence[str]] = ()
    """Methods that a subclass may override, and that the compiled update then calls."""
    REFUSED: ClassVar[Mapping[str, str]] = TRAINER
    """Methods that it must not override, with what to do instead."""

    def __init__(self, given: Given, **classic: Any) -> None:
        refuse_overrides(type(self), jrl_class(self), self.REFUSED)
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
        self.max_length = self._max_length(handle)
        self.data_collator = self._collator(given.data_collator)
        if self.NEEDS_ROWS and given.train_dataset is None and given.eval_dataset is None:
            raise ValueError(
                "`train_dataset` or `eval_dataset` must be given: there is nothing to learn from."
            )
        if given.eval_dataset is None:
            self._leave_evaluations_out()
        with says_what_takes_long("loading model and data"):
            self._samples = None if given.train_dataset is None else self._read(given.train_dataset, handle)
            self._eval_samples: _Evaluations = self._read_evaluations(given.eval_dataset, handle)
            self._check_best()
            self._watcher = Watcher(args, given.callbacks or (), self.NAMES, self.native_class.tokens_metric)
            self.native = self._make_native(handle, given)
        for one in (self._named, handle):  # the script's own handle saves what was trained, too
            one.attach(self.native)
        self.model = handle
        handle.model_tags = list(self.TAGS)
        self._watcher.write = lambda logs: self.log(logs)
        self._watcher.given |= {
            "model": handle,
            "processing_class": self.tokenizer,
            "tokenizer": self.tokenizer,
            "optimizer": None,
            "lr_scheduler": None,
        }
        self._training = False
        self._watcher.event("on_init_end")

    def _leave_evaluations_out(self) -> None:
        """There is nothing to evaluate on: a run that only watches itself by evaluations goes on without them.

        Raises:
          ValueError: If evaluations decide what is kept.
        """
        config = self.config
        if config.eval_strategy == "no":
            return
        strategy = word(config.eval_strategy)
        if config.load_best_model_at_end or config.save_strategy == SaveStrategy.BEST:
            raise ValueError(
                "`eval_dataset` must be given where `load_best_model_at_end` or `save_strategy` best goes by "
                f"evaluations (`eval_strategy` {strategy!r}), got None."
            )
        warnings.warn(
            f"`eval_strategy` is {strategy!r} and `eval_dataset` is None: the run does not evaluate.",
            stacklevel=5,
        )
        config.eval_strategy = IntervalStrategy.NO

    # What differs between the three.

    @abc.abstractmethod
    def _make_samples(self, records: Any, handle: ModelHandle, *, evaluation: bool) -> Any:
        """Tokenised samples of records."""

    @abc.abstractmethod
    def _method(self, handle: ModelHandle) -> MethodConfig:
        """The method's section."""

    @abc.abstractmethod
    def _collator(self, given: Any) -> Callable[[list[Any]], Any]:
        """Collator of the loaders' batches: the given one, or the default."""

    def own_objective(self) -> Callable[[Params, Frozen, Any], Loss] | None:
        """Objective of a subclass that computes its own loss of a batch; None: the configured one."""
        return None

    def own_loss(self) -> PairsLoss | None:
        """Loss of a subclass for pairs of log-probabilities; None: the configured one."""
        return None

    def _before_learning(self) -> None:
        """Called once, before the first step."""

    def _prediction(self, samples: Any) -> EvalPrediction | None:
        """Argument of `compute_metrics`; None where this trainer predicts nothing."""
        del samples
        return None

    def _max_length(self, handle: ModelHandle) -> int:
        """Most tokens of a row."""
        return flat_max_length(self.config, handle)

    # What a trainer is made of.

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
        self._named, found = found, untrained(found)
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

    def _make_native(self, handle: ModelHandle, given: Given) -> OfflineTrainer:
        """jrl's trainer, with model and data."""
        own = given.brings_optimizer
        config = self._native_config(handle, given_optimizer=own)
        steps, brought = config.train.total_steps, (given.optimizers, given.optimizer_cls_and_kwargs)
        optimizer = given_optimizer(self.config, *brought, steps) if own else None
        try:
            Path(config.train.checkpoint_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"`output_dir` must be a folder to write to, got {config.train.checkpoint_dir}: {error.strerror}."
            ) from error
        on_main(
            lambda: [str(file) for file in self.tokenizer.save_pretrained(config.tokenizer.tokenizer_path)]
        )
        native = self._watched(config, optimizer)
        self._add_samples(native)
        return native

    def _watched(self, config: TRLConfig, optimizer: Any) -> OfflineTrainer:
        """jrl's trainer, which asks this one when it evaluates."""
        made: Any = type(self.native_class.__name__, (Watched, self.native_class), {"owner": self})
        return cast(OfflineTrainer, made(config, optimizer=optimizer))

    def _add_samples(self, native: OfflineTrainer) -> None:
        """Gives jrl's trainer what it learns from and is measured on."""
        if self._samples is not None:
            native.samples = self._samples
        native.eval_samples = next(iter(self._eval_samples.values()), None)

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

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Trains.

        Args:
          resume_from_checkpoint: True: the newest checkpoint of `output_dir`; or the path of one, or of a run.
        Returns:
          (steps, mean loss of the steps, metrics) as transformers has it.
        Raises:
          ValueError: If there are no training data.
          FileNotFoundError: If `resume_from_checkpoint` is a path at which there is nothing.
        """
        native, train = self.native, self.native.config.train
        if self._samples is None:
            raise ValueError("`train_dataset` must be given to train.")
        self._check_run()
        say_untrained(self.model, "trainer.save_model(folder)")
        if resume_from_checkpoint:
            here = train.checkpoint_dir if resume_from_checkpoint is True else str(resume_from_checkpoint)
            if not Path(here).exists():
                raise FileNotFoundError(
                    f"`resume_from_checkpoint` must be a run or a checkpoint, got {here}."
                )
            train.resume_from_checkpoint = str(behind_link(Path(here)))
        began, watched, rows = time.perf_counter(), native.hooks, self._num_rows()
        # A stream has no passes that anybody could count: all of it is one.
        self._per_pass = train.total_steps if rows is None else -(-rows // train.batch_size)
        self._watcher.begin(
            max_steps=train.total_steps,
            per_pass=self._per_pass,
            batch_size=train.batch_size,
            records=lambda: native.history,
        )
        native.hooks = Hooks(
            log=self._watcher.record,
            evaluate=self._evaluated,
            save=self._saved,
            stop=self._watcher.stop,
        )
        self._training = True
        try:
            self._before_learning()
            native.learn()
            drop_links(native.run_dir)
        except CheckpointError as error:
            raise CheckpointError(_with_flat_names(str(error), self.config_class.__name__)) from error
        finally:
            self._training, native.hooks = False, watched
        if self.config.load_best_model_at_end:
            self._load_best()
        metrics = self._finish(time.perf_counter() - began)
        return TrainOutput(self.state.global_step, metrics["train_loss"], metrics)

    def _check_run(self) -> None:
        """Refuses methods of a script's own that the run would not call.

        Raises:
          TypeError: Naming the method.
        """
        self._check_assigned()
        base, own = jrl_class(self), type(self).__name__
        due = {"evaluate": self.config.eval_strategy, "save_model": self.config.save_strategy}
        for name in own_methods(self, base, tuple(IN_A_RUN)):
            if due[name] != "no":
                raise TypeError(
                    f"`{own}.{name}` is not called by a run, which has `{_STRATEGIES[name]}` = {word(due[name])!r}: "
                    f'{IN_A_RUN[name]} Or set it to "no" and call the method yourself.'
                )

    def _check_assigned(self) -> None:
        """Refuses methods that were put on the trainer, where the compiled update does not see them.

        Raises:
          TypeError: Naming the method.
        """
        late = vars(self).keys() & {*self.TRACED, *self.REFUSED}
        if late:
            raise TypeError(
                f"`{min(late)}` must be a method of a subclass, and not put on the trainer: the update is compiled "
                "with what is there when it is made."
            )

    def _finish(self, seconds: float) -> dict[str, float]:
        figures = {"train_runtime": seconds}
        steps = self.state.global_step - self._watcher.resumed_at
        figures["train_steps_per_second"] = steps / seconds
        figures["train_samples_per_second"] = steps * self.native.config.train.batch_size / seconds
        return self._watcher.end(figures)

    def _load_best(self) -> None:
        """Puts back the state of the best evaluation, which a checkpoint of its own holds."""
        step = self.state.best_global_step
        if not step or step == self.state.global_step:
            return
        folder = checkpoints_in(self.native.run_dir).get(step)
        if folder is None or not (folder / STATE).exists():
            warnings.warn(
                f"`load_best_model_at_end`: there is no whole checkpoint of the best step, {step}; the last stays.",
                stacklevel=3,
            )
            return
        self.native.state = read_state(folder / STATE, self.native.state)
        self.state.best_model_checkpoint = str(folder)

    def run_evaluation(self, step: int, measure: Callable[[int], Evaluation | None]) -> Evaluation | None:
        """Evaluates between two steps, where jrl's trainer asks for it.

        Args:
          step: Optimizer step.
          measure: jrl's own evaluation.
        """
        if self._training and not self._evaluates_at(step):
            return None
        found = measure(step)
        if found is None:
            return None
        metrics = dict(found.metrics)
        for name, samples in self._eval_samples.items():
            metrics |= self._named_metrics(name, samples, metrics)
        score = found.score
        shown = translated(metrics, self.NAMES, "eval")
        best = best_name(self.config)
        if best is not None:
            if best not in shown:
                raise ValueError(
                    f"`metric_for_best_model` must be one of {sorted(name[5:] for name in shown)}, got "
                    f"{self.config.metric_for_best_model!r}."
                )
            score = shown[best] if self.args.greater_is_better else -shown[best]
        return replace(found, metrics=metrics, score=score)

    def _evaluates_at(self, step: int) -> bool:
        """True where a run evaluates at this step: not unless asked to, nor before its first step or `eval_delay`."""
        args = self.config
        if args.eval_strategy == "no":
            return False
        if step == 0:
            return bool(args.eval_on_start)
        return step >= args.eval_delay * (self._per_pass if args.eval_strategy == "epoch" else 1)

    def _named_metrics(self, name: str, samples: Any, main: Mapping[str, float]) -> dict[str, float]:
        """Metrics of one of the evaluation sets, as `eval/<set>_<metric>` where there are several."""
        if name == MAIN:
            return {f"{HELD_OUT}{key}": value for key, value in self._computed(samples).items()}
        first = name == next(iter(self._eval_samples))
        found = (
            {key.removeprefix(HELD_OUT): value for key, value in main.items() if key.startswith(HELD_OUT)}
            if first
            else self.native.measure_samples(samples)
        )
        bare = {self.NAMES.get(key, key): value for key, value in found.items()}
        return {f"{HELD_OUT}{name}_{key}": value for key, value in (bare | self._computed(samples)).items()}

    def _computed(self, samples: Any) -> dict[str, float]:
        """Metrics of the user's `compute_metrics`."""
        if self.compute_metrics is None or self.args.prediction_loss_only:
            return {}
        prediction = self._prediction(samples)
        if prediction is None:
            warn_ignored("compute_metrics", f"{type(self).__name__} makes no predictions to compute on")
            return {}
        found = self.compute_metrics(prediction)
        return {str(key).removeprefix("eval_"): float(value) for key, value in found.items()}

    def _saved(self, checkpoint: Path) -> None:
        link_model(checkpoint)
        self._watcher.saved(checkpoint)

    def _evaluated(self, record: Mapping[str, Any]) -> None:
        self._watcher.evaluated(translated(record, self.NAMES, "eval"))

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: Sequence[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Metrics of the present parameters.

        Args:
          eval_dataset: Rows, or several sets of them by name; None: those of the constructor.
          ignore_keys: Of a torch model's outputs; no effect.
          metric_key_prefix: Before every name.
        Raises:
          ValueError: If there is nothing to evaluate on.
        """
        if ignore_keys is not None:
            warn_ignored(
                "evaluate: ignore_keys", "metrics are computed where the model is, and nothing else is kept"
            )
        began = time.perf_counter()
        given = (
            self._eval_samples if eval_dataset is None else self._read_evaluations(eval_dataset, self.model)
        )
        if not given:
            raise ValueError("`eval_dataset` must be given, here or to the constructor.")
        metrics: dict[str, float] = {}
        for name, samples in given.items():
            found = {self.NAMES.get(k, k): v for k, v in self.native.measure_samples(samples).items()}
            prefix = metric_key_prefix if name == MAIN else f"{metric_key_prefix}_{name}"
            metrics |= {f"{prefix}_{key}": value for key, value in (found | self._computed(samples)).items()}
        metrics[f"{metric_key_prefix}_runtime"] = time.perf_counter() - began
        self._watcher.evaluated(metrics, in_run=False)
        return metrics

    def predict(
        self, test_dataset: Any, ignore_keys: Sequence[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predictions and metrics on other data; arguments as of `evaluate`.

        Raises:
          ValueError: If this trainer makes no predictions.
        """
        if ignore_keys is not None:
            warn_ignored("predict: ignore_keys", "predictions are the scores or logits alone")
        samples = self._read(test_dataset, self.model, name="test_dataset")
        prediction = self._prediction(samples)
        if prediction is None:
            raise ValueError(f"{type(self).__name__} makes no predictions; `evaluate` has its metrics.")
        found = {self.NAMES.get(k, k): v for k, v in self.native.measure_samples(samples).items()}
        metrics = {
            f"{metric_key_prefix}_{key}": value for key, value in (found | self._computed(samples)).items()
        }
        self._watcher.event("on_predict", metrics=metrics)
        return PredictionOutput(prediction.predictions, prediction.label_ids, metrics)


class Watched(OfflineTrainer):
    """A trainer of jrl's whose evaluations go through the trainer of TRL's shape that owns it."""

    owner: ClassVar[FlatTrainer]
    resume_argument = "resume_from_checkpoint"

    @cached_property
    def own_objective(self) -> Callable[[Params, Frozen, Any], Loss] | None:  # type: ignore[override]
        """Objective of the owner; None: the configured one."""
        return self.owner.own_objective()

    @cached_property
    def own_loss(self) -> PairsLoss | None:
        """Loss of the owner for pairs of log-probabilities; None: the configured one."""
        return self.owner.own_loss()

    def run_evaluation(self, step: int) -> Evaluation | None:
        """Evaluates by the owner's method, which asks for jrl's own."""
        return self.owner.run_evaluation(step, super().run_evaluation)


def _with_flat_names(text: str, config_name: str) -> str:
    """An error of checkpoints in the words of these trainers: transformers 5 has no field for overwriting."""
    overwrite = f"overwrite_output_dir=True` of `jrl.trl.{config_name}"
    for native, flat in {**_FLAT_NAMES, "train.overwrite: true": overwrite}.items():
        text = text.replace(native, flat)
    return text
