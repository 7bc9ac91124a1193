# SPDX-License-Identifier: Apache-2.0
"""How a trainer of TRL's shape runs: training, evaluation and prediction over jrl's own trainer."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PredictionOutput, TrainOutput

from jrl.trainers.checkpoint import STATE, CheckpointError
from jrl.trainers.evaluation import Evaluation
from jrl.trainers.hooks import Hooks
from jrl.trainers.offline import HELD_OUT
from jrl.trainers.resume import checkpoints_in
from jrl.trainers.state_io import read_state
from jrl.trl.base import MAIN, FlatBase
from jrl.trl.watching import best_name, translated
from jrl.trlx.ignored import warn_ignored

# What errors of checkpoints speak of → the argument here.
_FLAT_NAMES = {
    "train.resume_from_checkpoint": "resume_from_checkpoint",
    "train.overwrite: true": "overwrite_output_dir=True",
    "train.checkpoint_dir": "output_dir",
    "`train.save_optimizer` was false": "`save_only_model` was True",
}


class RunningTrainer(FlatBase):
    """Training and measuring."""

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
        if resume_from_checkpoint:
            here = train.checkpoint_dir if resume_from_checkpoint is True else str(resume_from_checkpoint)
            if not Path(here).exists():
                raise FileNotFoundError(
                    f"`resume_from_checkpoint` must be a run or a checkpoint, got {here}."
                )
            train.resume_from_checkpoint = here
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
            save=self._watcher.saved,
            stop=self._watcher.stop,
        )
        self._training = True
        try:
            self._before_learning()
            native.learn()
        except CheckpointError as error:
            raise CheckpointError(_with_flat_names(str(error))) from error
        finally:
            self._training, native.hooks = False, watched
        if self.config.load_best_model_at_end:
            self._load_best()
        metrics = self._finish(time.perf_counter() - began)
        return TrainOutput(self.state.global_step, metrics["train_loss"], metrics)

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
        """What jrl's trainer asks for between two steps.

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
        """Whether a run evaluates here: not unless asked to, nor before its first step or `eval_delay`."""
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
        """What the user's `compute_metrics` finds."""
        if self.compute_metrics is None or self.args.prediction_loss_only:
            return {}
        prediction = self._prediction(samples)
        if prediction is None:
            warn_ignored("compute_metrics", f"{type(self).__name__} makes no predictions to compute on")
            return {}
        found = self.compute_metrics(prediction)
        return {str(key).removeprefix("eval_"): float(value) for key, value in found.items()}

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
        return PredictionOutput(prediction.predictions, prediction.label_ids, metrics)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """One line more in `state.log_history`, shown to the callbacks.

        Args:
          logs: Name → number.
          start_time: Of transformers; no effect.
        """
        del start_time
        self._watcher.log(dict(logs))


def _with_flat_names(text: str) -> str:
    for native, flat in _FLAT_NAMES.items():
        text = text.replace(native, flat)
    return text
