# SPDX-License-Identifier: Apache-2.0
"""State of a run as transformers' callbacks and `state.log_history` see it: records, evaluations, checkpoints."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from jrl.distributed import is_main
from jrl.trainers.offline import HELD_OUT
from jrl.trl.arguments import interval, word

Names = Mapping[str, str]

OPTIMIZER_NAMES: Names = {"optim/grad_norm": "grad_norm", "optim/learning_rate": "learning_rate"}
"""jrl's names of what every algorithm reports → transformers'."""
NEVER_CALLED = ("on_pre_optimizer_step", "on_substep_end", "on_prediction_step", "on_push_begin")
"""Events of transformers inside what is one compiled program here, or of what a run does not do."""
NOT_READ = {
    "should_epoch_stop": "a pass over the data ends with its rows; `control.should_training_stop` ends the run",
    "should_evaluate": "`eval_strategy` and `eval_steps` say when a run evaluates",
    "should_save": "`save_strategy` and `save_steps` say when a run saves",
}
"""What callbacks of transformers set in its control and no run reads here → what to do instead."""


@dataclass
class Window:
    """Training records since the last logged line.

    Attributes:
      names: jrl's metric → TRL's.
      sums: TRL's metric → (sum, records that have it).
    """

    names: Names
    sums: dict[str, tuple[float, int]] = field(default_factory=dict)

    def add(self, record: Mapping[str, Any]) -> None:
        """Adds a step's record."""
        for native, name in self.names.items():
            if native in record:
                total, count = self.sums.get(name, (0.0, 0))
                self.sums[name] = total + float(record[native]), count + 1

    def take(self) -> dict[str, float]:
        """Means over the steps of the window, the learning rate of its last step among them; the next one is empty."""
        found = {name: total / count for name, (total, count) in self.sums.items()}
        self.sums = {}
        return found


def translated(record: Mapping[str, Any], names: Names, prefix: str) -> dict[str, float]:
    """An evaluation's metrics under TRL's names.

    Args:
      record: With jrl's names behind `eval/`; what is not among `names` keeps its own.
      names: jrl's metric → TRL's.
      prefix: Such as "eval".
    """
    found = {}
    for name, value in record.items():
        if name.startswith(HELD_OUT):
            bare = name.removeprefix(HELD_OUT)
            found[f"{prefix}_{names.get(bare, bare)}"] = value
    return found


class Watcher:
    """Turns a run's hooks into transformers' state, log lines and callback events.

    Records come one step late, as everywhere in jrl, so a callback that stops the run does so one step later than in
    transformers; what it sees is in order all the same. Of several processes each calls its callbacks, and `state` says
    which of them it is. Of `control`, `should_training_stop` and `should_log` are read; the others are warned of.

    Args:
      args: What callbacks get as `args`.
      callbacks: Objects or classes of transformers' `TrainerCallback`.
      names: jrl's metric → TRL's.
      tokens: jrl's name of the trained tokens.

    Attributes:
      state: transformers' `TrainerState`: step, epoch, `log_history`.
      control: What callbacks set.
      given: Further keywords of every event: `model`, `processing_class`, ...
      write: Writes a line of a run; a trainer puts its own method here, which a script may override.
      resumed_at: Steps that an earlier call of `train` made; known from the first record on.
    """

    def __init__(self, args: TrainingArguments, callbacks: Sequence[Any], names: Names, tokens: str) -> None:
        self.names: dict[str, str] = {**OPTIMIZER_NAMES, **names}
        self.args, self._tokens = args, tokens
        self.callbacks: list[TrainerCallback] = [make_callback(callback) for callback in callbacks]
        self.state, self.control = TrainerState(), TrainerControl()
        self.given: dict[str, Any] = {}
        self.resumed_at = 0
        self.write: Callable[[dict[str, float]], None] = self.log
        self._window = Window(self.names)
        self._num_tokens, self._per_pass, self._every = 0.0, 0, 0
        self._losses: list[float] = []
        self._said: set[tuple[type, str]] = set()
        self._earlier: Callable[[], Sequence[Mapping[str, Any]]] | None = None

    def show(self, native: str, name: str) -> None:
        """Takes another figure of the records into the logged lines.

        Args:
          native: jrl's name of it.
          name: That of the lines.
        """
        self.names.setdefault(native, name)

    def begin(
        self,
        *,
        max_steps: int,
        per_pass: int,
        batch_size: int,
        records: Callable[[], Sequence[Mapping[str, Any]]],
    ) -> None:
        """Before a run.

        Args:
          max_steps: Optimizer steps of the whole run.
          per_pass: Those of a pass over the data.
          batch_size: Rows of a step.
          records: Gives the records of the run so far: once it goes on, those from before it was resumed too.
        """
        self.state = state = TrainerState()
        self._earlier, self._num_tokens, self.resumed_at = records, 0.0, 0
        state.max_steps, state.num_train_epochs = max_steps, math.ceil(max_steps / per_pass)
        state.train_batch_size = batch_size
        self._per_pass = per_pass
        self._every = interval(word(self.args.logging_strategy), self.args.logging_steps, max_steps, per_pass)
        state.logging_steps = self._every
        self._losses, self._window = [], Window(self.names)
        self.control.should_training_stop = False
        self.event("on_train_begin")

    def _catch_up(self, num_new: int = 0) -> None:
        """Takes in what a resumed run did before, up to its last `num_new` figures; callbacks were told then."""
        records, self._earlier = [] if self._earlier is None else self._earlier(), None
        # What a watch found is no figure, and stands behind the step that it is about.
        figures = [record for record in records if "iteration" in record or "evaluation" in record]
        for record in figures[: len(figures) - num_new]:
            if "iteration" in record:
                logs = self._taken(record)
                self.resumed_at = self.state.global_step
            else:
                logs = translated(record, self.names, "eval")
                self._keep_best(logs)
            if logs is not None:
                self._write(logs)

    def record(self, record: Mapping[str, Any]) -> None:
        """Records an optimizer step."""
        self._catch_up(1)
        step = int(record["step"])
        first_of_pass = (step - 1) % self._per_pass == 0
        if first_of_pass:
            self.event("on_epoch_begin")
        self.event("on_step_begin")
        logs = self._taken(record)
        self.event("on_optimizer_step")
        self.event("on_step_end")
        if logs is None and self.control.should_log:
            logs = self._line(record)
        self.control.should_log = False
        if logs is not None:
            self.write(logs)
        if step % self._per_pass == 0 or step == self.state.max_steps:
            self.event("on_epoch_end")

    def _taken(self, record: Mapping[str, Any]) -> dict[str, float] | None:
        """Counts a step in; its line where one is due."""
        step, before = int(record["step"]), self.state.global_step
        self.state.global_step, self.state.epoch = step, step / self._per_pass
        self._num_tokens += float(record.get(self._tokens, 0.0))
        self._window.add(record)
        loss = next((record[n] for n, to in self.names.items() if to == "loss" and n in record), None)
        if loss is not None:
            self._losses.append(float(loss))
        # An iteration of an online algorithm is one record of several steps.
        due = self._every and (
            step // self._every > before // self._every or (before == 0 and self.args.logging_first_step)
        )
        return self._line(record) if due else None

    def _line(self, record: Mapping[str, Any]) -> dict[str, float]:
        """The window's means, with the last step's learning rate."""
        rate = record.get("optim/learning_rate")
        more = {} if rate is None else {"learning_rate": float(rate)}
        return self._window.take() | more | {"num_tokens": self._num_tokens}

    def _write(self, logs: dict[str, float]) -> None:
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})

    def log(self, logs: dict[str, float]) -> None:
        """Writes a line of `log_history` and shows it to the callbacks."""
        self._write(logs)
        self.event("on_log", logs=logs)

    def evaluated(self, metrics: dict[str, float], *, in_run: bool = True) -> None:
        """Reports an evaluation, with TRL's names; `in_run`: as a record of the run."""
        if in_run:
            self._catch_up(1)
        self.write(dict(metrics))
        self.event("on_evaluate", metrics=metrics)
        self._keep_best(metrics)

    def _keep_best(self, metrics: Mapping[str, float]) -> None:
        """After the callbacks: an early stop compares with the best evaluation before this one."""
        name = best_name(self.args)
        if name is None or name not in metrics:
            return
        value, best = metrics[name], self.state.best_metric
        if best is None or (value > best if self.args.greater_is_better else value < best):
            self.state.best_metric, self.state.best_global_step = value, self.state.global_step

    def saved(self, folder: Path) -> None:
        """Reports a checkpoint."""
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(folder)
        self.event("on_save")

    def end(self, figures: dict[str, float]) -> dict[str, float]:
        """After a run: its last line. Returns the line."""
        self._catch_up()
        losses = self._losses
        figures = {**figures, "train_loss": sum(losses) / len(losses) if losses else math.nan}
        if self.state.epoch is not None:
            figures["epoch"] = self.state.epoch
        self.write(figures)
        self.event("on_train_end")
        return figures

    @property
    def training_loss(self) -> float:
        """Mean loss of the run's steps."""
        return sum(self._losses) / len(self._losses) if self._losses else math.nan

    def stop(self) -> bool:
        """True where a callback has asked for the end."""
        return bool(self.control.should_training_stop)

    def event(self, name: str, **more: Any) -> None:
        """Calls every callback's method of this name."""
        self.state.is_local_process_zero = self.state.is_world_process_zero = is_main()
        for callback in self.callbacks:
            found = getattr(callback, name)(self.args, self.state, self.control, **self.given, **more)
            if found is not None:
                self.control = found
            self._clear(callback)

    def _clear(self, callback: TrainerCallback) -> None:
        """Takes back what nothing reads, and says so once a class."""
        for flag, cure in NOT_READ.items():
            if not vars(self.control)[flag]:
                continue
            vars(self.control)[flag] = False
            if not _is_transformers(callback) and (type(callback), flag) not in self._said:
                self._said.add((type(callback), flag))
                warnings.warn(
                    f"`{type(callback).__name__}` set `control.{flag}`: no run reads it here, and {cure}.",
                    stacklevel=4,
                )


def make_callback(callback: Any) -> TrainerCallback:
    """An object of a callback, of which the class may be given too; events that never come are warned of.

    Raises:
      TypeError: If it is neither.
    """
    found = callback() if isinstance(callback, type) else callback
    if not isinstance(found, TrainerCallback):
        raise TypeError(f"`callbacks` must hold transformers' TrainerCallback, got {type(found).__name__}.")
    for event in NEVER_CALLED:
        if getattr(type(found), event) is not getattr(TrainerCallback, event) and not _is_transformers(found):
            warnings.warn(
                f"`{type(found).__name__}.{event}` is never called: an optimizer step is one compiled program, an "
                "evaluation too, and a run uploads nothing. `on_step_end` and `on_evaluate` come after them.",
                stacklevel=5,
            )
    return found


def _is_transformers(callback: TrainerCallback) -> bool:
    """True for transformers' own callbacks, which do more than is needed here."""
    return type(callback).__module__.partition(".")[0] == "transformers"


def best_name(args: TrainingArguments) -> str | None:
    """Name of the metric that decides which evaluation is the best, as evaluations have it."""
    name = args.metric_for_best_model
    return name if name is None or name.startswith("eval_") else f"eval_{name}"
