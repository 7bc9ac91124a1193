# SPDX-License-Identifier: Apache-2.0
"""The flat configurations: transformers' `TrainingArguments`, and how they become the sections of a `TRLConfig`."""

from __future__ import annotations

import enum
import json
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, Literal

import jax
from transformers import IntervalStrategy, TrainingArguments
from transformers.trainer_utils import HubStrategy, SaveStrategy, SchedulerType
from transformers.training_args import OptimizerNames

from jrl.distributed import join
from jrl.interop import warn_ignored
from jrl.trainers.config import TrainConfig
from jrl.trainers.loading import default_compute_dtype
from jrl.trl.field_table import TRAINER_FIELDS, Meaning

_ALL = 10**6
"""Checkpoints kept where `save_total_limit` sets no limit."""


def described(default: Any, text: str, *, kw_only: bool = False) -> Any:
    """A dataclass field with what the command line says of it."""
    return field(default=default, metadata={"help": text}, kw_only=kw_only)


@dataclass
class FlatArguments(TrainingArguments):
    """Fields that `RewardConfig`, `SFTConfig` and `DPOConfig` share: transformers', with TRL's defaults.

    Torch is never asked for anything: `device`, `n_gpu` and `train_batch_size` of transformers have no meaning here.
    `docs/migrating/trl_surface.md` says of every field what becomes of it.
    """

    MEANINGS: ClassVar[Mapping[str, Meaning]] = TRAINER_FIELDS
    DICTIONARIES: ClassVar[tuple[str, ...]] = (
        *TrainingArguments._VALID_DICT_FIELDS,
        "model_init_kwargs",
        "mesh",
    )
    """Fields that the command line gives as JSON."""

    logging_steps: float = described(
        10, "Optimizer steps of one logged window; below 1, a share of all steps."
    )
    gradient_checkpointing: bool | None = described(True, "Recompute activations in the backward pass.")
    bf16: bool | None = described(  # type: ignore[assignment]
        None, "Compute in bfloat16; by default on an accelerator, not on a CPU."
    )
    lr_scheduler_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Arguments of the schedule, as JSON."}
    )

    evaluation_strategy: str | None = described(None, "Older name of eval_strategy.", kw_only=True)
    warmup_ratio: float | None = described(None, "Share of all steps that the rate warms up.", kw_only=True)
    logging_dir: str | None = described(None, "Folder of the tracker's files.", kw_only=True)
    overwrite_output_dir: bool = described(
        False, "A new run may delete the checkpoints in output_dir.", kw_only=True
    )
    group_by_length: bool = described(False, "Has no effect.", kw_only=True)
    no_cuda: bool = described(False, "Has no effect; JAX_PLATFORMS=cpu chooses the device.", kw_only=True)
    save_safetensors: bool = described(True, "Has no effect: models are always safetensors.", kw_only=True)
    mesh: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": 'Devices along the axes data, fsdp, expert and tensor, as JSON: {"fsdp": 4}.'},
        kw_only=True,
    )

    def __post_init__(self) -> None:
        """Reads texts as what they stand for, and checks what does not need the run to be known."""
        if self.output_dir is None:
            self.output_dir = "trainer_output"
        self.output_dir = os.path.expanduser(self.output_dir)
        for name in self.DICTIONARIES:
            value = vars(self).get(name)  # not every configuration has every one of them
            if isinstance(value, str) and value.startswith("{"):
                vars(self)[name] = _read_json(name, value)
            elif isinstance(value, str) and name not in TrainingArguments._VALID_DICT_FIELDS:
                raise ValueError(f"`{name}` must be a dict, or JSON that begins with a brace, got {value!r}.")
        if self.evaluation_strategy is not None:
            self.eval_strategy = self.evaluation_strategy
        if self.activation_checkpointing is None:
            self.activation_checkpointing = bool(self.gradient_checkpointing)
        self.gradient_checkpointing = self.activation_checkpointing
        if self.bf16 and self.fp16:
            raise ValueError("`bf16` and `fp16` must not both be True: one type computes.")
        self._read_choices()
        self._check_intervals()

    def _read_choices(self) -> None:
        """Words as members of transformers' enumerations; its ValueError names those that there are."""
        self.eval_strategy = IntervalStrategy(self.eval_strategy)
        self.logging_strategy = IntervalStrategy(self.logging_strategy)
        self.save_strategy = SaveStrategy(self.save_strategy)
        self.hub_strategy = HubStrategy(self.hub_strategy)
        self.lr_scheduler_type = SchedulerType(self.lr_scheduler_type)
        self.optim = OptimizerNames(self.optim)
        self.do_eval = self.do_eval or self.eval_strategy != IntervalStrategy.NO
        if self.metric_for_best_model is None and self.load_best_model_at_end:
            self.metric_for_best_model = "loss"
        if self.greater_is_better is None and self.metric_for_best_model is not None:
            self.greater_is_better = not self.metric_for_best_model.endswith("loss")
        reports = self.report_to or []
        self.report_to = [
            name
            for name in ([reports] if isinstance(reports, str) else reports)
            if name is not None and name != "none"
        ]
        self.debug = self.debug or []

    def _check_intervals(self) -> None:
        """Numbers of steps, and which of them must fit each other."""
        if not self.eval_steps and self.eval_strategy == IntervalStrategy.STEPS:
            self.eval_steps = self.logging_steps
        for name in ("logging", "eval", "save"):
            steps, strategy = vars(self)[f"{name}_steps"], vars(self)[f"{name}_strategy"]
            if strategy == "steps" and not (steps and (0 < steps < 1 or steps == int(steps) >= 1)):
                raise ValueError(
                    f"`{name}_steps` must be a whole number of steps, or a share between 0 and 1, got {steps!r}."
                )
        if self.load_best_model_at_end and self.eval_strategy == IntervalStrategy.NO:
            raise ValueError(
                "`load_best_model_at_end` needs evaluations: `eval_strategy` must be steps or epoch, got no."
            )
        if self.save_strategy == SaveStrategy.BEST and self.eval_strategy == IntervalStrategy.NO:
            raise ValueError(
                "`save_strategy` best needs evaluations: `eval_strategy` must be steps or epoch, got no."
            )
        for name, count in (
            ("per_device_train_batch_size", self.per_device_train_batch_size),
            ("per_device_eval_batch_size", self.per_device_eval_batch_size),
            ("gradient_accumulation_steps", self.gradient_accumulation_steps),
        ):
            if count < 1:
                raise ValueError(f"`{name}` must be at least 1, got {count}.")
        if self.max_steps <= 0 and self.num_train_epochs <= 0:
            raise ValueError(
                f"`num_train_epochs` must be positive where `max_steps` is not, got {self.num_train_epochs}."
            )
        if self.warmup_steps < 0:
            raise ValueError(f"`warmup_steps` must be at least 0, got {self.warmup_steps}.")


def check_meanings(args: TrainingArguments, meanings: Mapping[str, Meaning]) -> None:
    """Refuses what cannot be had, and says once what has no effect, of all fields that differ from their default.

    Args:
      args: A flat configuration, or transformers' own arguments.
      meanings: Of every field.
    Raises:
      ValueError: On the first field that is refused.
    """
    for entry in fields(args):
        meaning, value = meanings[entry.name], vars(args)[entry.name]
        if meaning.kind == "mapped" or _is_default(value, entry):
            continue
        if meaning.kind == "refused":
            raise ValueError(f"`{entry.name}` must be left at its default, got {value!r}: {meaning.text}.")
        warn_ignored(f"{type(args).__name__}({entry.name}=)", meaning.text)


def _is_default(value: Any, entry: Any) -> bool:
    """True where a value equals the default; transformers replaces other empty values that it is given."""
    default = entry.default if entry.default_factory is MISSING else entry.default_factory()
    if is_dataclass(value) and not isinstance(value, type):
        return value == type(value)()
    if entry.name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        return value in (None, {"use_reentrant": False}, {"use_reentrant": True})
    return value == default or (not value and not default)


def train_section(
    args: TrainingArguments,
    *,
    trainer: str,
    seq_length: int,
    num_rows: int | None,
    mesh: Mapping[str, int] | None,
) -> TrainConfig:
    """The section of the run.

    Args:
      args: A flat configuration, or transformers' own arguments.
      trainer: Name of jrl's trainer.
      seq_length: Most tokens of a row.
      num_rows: Rows of a pass, those that were dropped left out; None: not known, of a stream.
      mesh: Sizes of the axes; None: all devices on `data`.
    Raises:
      ValueError: If the rows are not counted and `max_steps` does not say when to stop.
    """
    minibatch_size = args.per_device_train_batch_size * data_devices(mesh)
    batch_size = minibatch_size * args.gradient_accumulation_steps
    total_steps, per_pass = count_steps(args, num_rows, batch_size)
    old = args if isinstance(args, FlatArguments) else None
    saves = word(args.save_strategy)
    return TrainConfig(
        total_steps=total_steps,
        seq_length=seq_length,
        epochs=total_steps if per_pass is None else math.ceil(total_steps / per_pass),
        batch_size=batch_size,
        minibatch_size=minibatch_size,
        checkpoint_interval=interval(saves, args.save_steps, total_steps, per_pass),
        eval_interval=interval(word(args.eval_strategy), args.eval_steps, total_steps, per_pass),
        trainer=trainer,
        checkpoint_dir=str(args.output_dir),
        project_name=args.project,
        run_name=args.run_name,
        save_best=args.load_best_model_at_end or saves == "best",
        save_optimizer=not args.save_only_model,
        keep_checkpoints=args.save_total_limit or _ALL,
        overwrite=old is not None and old.overwrite_output_dir,
        logging_dir=None if old is None else old.logging_dir,
        tracker=_tracker(args.report_to),
        resume_from_checkpoint=args.resume_from_checkpoint,
        seed=args.seed,
        mesh=None if mesh is None else dict(mesh),
        max_grad_norm=args.max_grad_norm or None,
        compute_dtype=compute_dtype(args),
        remat=bool(args.gradient_checkpointing),
    )


def data_devices(mesh: Mapping[str, int] | None) -> int:
    """Devices that rows are divided over; those of the tensor axis share theirs."""
    join()  # before anything of JAX is asked
    tensor = (mesh or {}).get("tensor", 1)
    return max(jax.device_count() // max(tensor, 1), 1)


def count_steps(args: TrainingArguments, num_rows: int | None, batch_size: int) -> tuple[int, int | None]:
    """(optimizer steps of the run, those of one pass over the data; None where rows are not counted).

    Raises:
      ValueError: If nothing says when to stop.
    """
    per_pass = None if num_rows is None else math.ceil(num_rows / batch_size)
    if args.max_steps > 0:
        return args.max_steps, per_pass
    if per_pass is None:
        raise ValueError("`max_steps` must be positive for a data set without a length, got -1.")
    return max(math.ceil(args.num_train_epochs * per_pass), 1), per_pass


def interval(strategy: str, steps: float | None, total_steps: int, per_pass: int | None) -> int:
    """Optimizer steps between two events; 0: none on the way."""
    if strategy == "epoch":
        return per_pass or 0
    if strategy != "steps" or not steps:
        return 0
    return int(steps) if steps >= 1 else max(math.ceil(steps * total_steps), 1)


def compute_dtype(args: TrainingArguments) -> Literal["float32", "bfloat16"]:
    """bfloat16 or float32, as `bf16` and `fp16` say; where they say nothing, bfloat16 on an accelerator alone."""
    if args.fp16:
        warnings.warn(
            "`fp16` computes in bfloat16 here: half precision would need loss scaling.", stacklevel=2
        )
        return "bfloat16"
    if args.bf16 is None:
        return default_compute_dtype()
    return "bfloat16" if args.bf16 else "float32"


def word(name: Any) -> str:
    """The value of one of transformers' enumerations, or the text itself."""
    return str(name.value) if isinstance(name, enum.Enum) else str(name)


def _tracker(report_to: Any) -> Any:
    """The one tracker that is named."""
    known = {"wandb", "tensorboard"}
    names = [report_to] if isinstance(report_to, str) else list(report_to or [])
    names = [name for name in names if name is not None and name != "none"]
    wrong = [name for name in names if name not in known]
    if wrong or len(names) > 1:
        raise ValueError(f"`report_to` must be one of {sorted(known)}, or none, got {names}.")
    return names[0] if names else None


def _read_json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"`{name}` must be JSON, got {text!r}: {error}.") from error
