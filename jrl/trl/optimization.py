# SPDX-License-Identifier: Apache-2.0
"""transformers' names of optimizers and learning-rate schedules, as jrl has them."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from typing import Any

import optax
from transformers import TrainingArguments

from jrl.learners.optimizers import make_optimizer, make_schedule
from jrl.trainers.config import OptimizerConfig, SchedulerConfig
from jrl.trl.arguments import FlatArguments, word
from jrl.trl.torch_optimizers import (
    Named,
    is_torch_optimizer,
    is_torch_schedule,
    named_optimizer,
    tabulated,
)

Arguments = Mapping[str, Any]

_ADAM = ("betas", "eps", "weight_decay")
OPTIMIZERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "adamw_torch": ("adamw", _ADAM),
    "adamw_torch_fused": ("adamw", _ADAM),
    "adamw_torch_xla": ("adamw", _ADAM),
    "adamw_torch_npu_fused": ("adamw", _ADAM),
    "adamw_anyprecision": ("adamw", _ADAM),
    "paged_adamw_32bit": ("adamw", _ADAM),
    "lion_32bit": ("lion", ("betas", "weight_decay")),
    "paged_lion_32bit": ("lion", ("betas", "weight_decay")),
    "adafactor": ("adafactor", ("weight_decay",)),
    "rmsprop": ("rmsprop", ("weight_decay",)),
    "sgd": ("sgd", ("weight_decay",)),
}
"""transformers' name → (jrl's, what of Adam's arguments it takes)."""


def optimizer_section(args: TrainingArguments) -> OptimizerConfig:
    """The optimizer of `optim`, `learning_rate`, the Adam arguments and `optim_args`.

    Raises:
      ValueError: If jrl has no such optimizer.
    """
    name = word(args.optim)
    if name not in OPTIMIZERS:
        why = (
            "moments of few bits need a torch package; to save optimizer memory train LoRA adapters (`peft_config`)"
            if name.endswith(("8bit", "4bit"))
            else "jrl has no such optimizer; give an optax one as `optimizers=(transformation, None)`"
        )
        raise ValueError(f"`optim` must be one of {sorted(OPTIMIZERS)}, got {name!r}: {why}.")
    native, taken = OPTIMIZERS[name]
    known = {
        "betas": [args.adam_beta1, args.adam_beta2],
        "eps": args.adam_epsilon,
        "weight_decay": args.weight_decay,
    }
    kwargs = {"lr": args.learning_rate} | {key: known[key] for key in taken}
    return OptimizerConfig(native, kwargs | _named_values(args.optim_args))


def _named_values(text: str | None) -> dict[str, Any]:
    """`momentum=0.9,nesterov=True` as a dict."""
    found = {}
    for part in (text or "").replace(" ", "").split(","):
        if not part:
            continue
        name, _, value = part.partition("=")
        try:
            found[name] = ast.literal_eval(value)
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"`optim_args` must be `name=value, ...`, got {text!r}.") from error
    return found


def warmup_of(args: TrainingArguments, total_steps: int, *, ratio: float | None = None) -> int:
    """Steps of the warm-up.

    Args:
      args: `warmup_steps` from 1 on is a number of steps, below that a share.
      total_steps: Optimizer steps of the run.
      ratio: `warmup_ratio` of older transformers: a share that counts where `warmup_steps` is 0.
    """
    given = args.warmup_steps or ratio or 0
    return int(given) if given >= 1 else math.ceil(total_steps * given)


def _constant(warmup: int, total: int, given: dict[str, Any], rate: float) -> SchedulerConfig:
    del warmup, total, given, rate
    return SchedulerConfig("constant", {})


def _constant_with_warmup(warmup: int, total: int, given: dict[str, Any], rate: float) -> SchedulerConfig:
    del total, given, rate
    return SchedulerConfig("warmup_constant", {"warmup_steps": warmup})


def _linear(warmup: int, total: int, given: dict[str, Any], rate: float) -> SchedulerConfig:
    del given, rate
    return SchedulerConfig("warmup_linear", {"warmup_steps": warmup, "total_steps": total})


def _cosine(warmup: int, total: int, given: dict[str, Any], rate: float) -> SchedulerConfig:
    if given.pop("num_cycles", 0.5) != 0.5:
        raise ValueError(
            "`lr_scheduler_kwargs`: `num_cycles` must be 0.5 (one fall from the rate to its end)."
        )
    del rate
    return SchedulerConfig("warmup_cosine", {"warmup_steps": warmup, "total_steps": total})


def _cosine_with_min_lr(warmup: int, total: int, given: dict[str, Any], rate: float) -> SchedulerConfig:
    end, share = given.pop("min_lr", None), given.pop("min_lr_rate", None)
    if (end is None) == (share is None):
        raise ValueError("`lr_scheduler_kwargs` must have `min_lr` or `min_lr_rate`, and not both.")
    found = _cosine(warmup, total, given, rate)
    return SchedulerConfig(found.name, found.kwargs | {"eta_min": rate * share if end is None else end})


def _polynomial(warmup: int, total: int, given: dict[str, Any], rate: float) -> SchedulerConfig:
    del rate
    shape = {"eta_min": given.pop("lr_end", 1e-7), "power": given.pop("power", 1.0)}
    return SchedulerConfig("warmup_polynomial", {"warmup_steps": warmup, "total_steps": total} | shape)


def _cosine_with_restarts(warmup: int, total: int, given: dict[str, Any], rate: float) -> SchedulerConfig:
    del rate
    cycles = {"num_cycles": given.pop("num_cycles", 1)}
    return SchedulerConfig("warmup_cosine_restarts", {"warmup_steps": warmup, "total_steps": total} | cycles)


def _inverse_sqrt(warmup: int, total: int, given: dict[str, Any], rate: float) -> SchedulerConfig:
    del total, rate
    timescale = given.pop("timescale", None)
    more = {} if timescale is None else {"timescale": timescale}
    return SchedulerConfig("warmup_inverse_sqrt", {"warmup_steps": warmup} | more)


def _warmup_stable_decay(warmup: int, total: int, given: dict[str, Any], rate: float) -> SchedulerConfig:
    del rate
    if "num_decay_steps" not in given:
        raise ValueError("`lr_scheduler_kwargs` must have `num_decay_steps` for 'warmup_stable_decay'.")
    decay = given.pop("num_decay_steps")
    steps = {"warmup_steps": warmup, "decay_steps": decay}
    steps["stable_steps"] = given.pop("num_stable_steps", max(total - warmup - decay, 0))
    shapes = ("warmup_type", "decay_type", "min_lr_ratio", "num_cycles")
    return SchedulerConfig(
        "warmup_stable_decay", steps | {name: given.pop(name) for name in shapes if name in given}
    )


SCHEDULES: Mapping[str, Callable[[int, int, dict[str, Any], float], SchedulerConfig]] = {
    "constant": _constant,
    "constant_with_warmup": _constant_with_warmup,
    "cosine": _cosine,
    "cosine_with_min_lr": _cosine_with_min_lr,
    "cosine_with_restarts": _cosine_with_restarts,
    "inverse_sqrt": _inverse_sqrt,
    "linear": _linear,
    "polynomial": _polynomial,
    "warmup_stable_decay": _warmup_stable_decay,
}
"""transformers' name → `(warmup_steps, total_steps, further arguments, learning rate) -> section`."""


def scheduler_section(
    args: TrainingArguments, total_steps: int, *, ratio: float | None = None
) -> SchedulerConfig:
    """The schedule of `lr_scheduler_type`, over all optimizer steps of the run.

    Args:
      args: With `lr_scheduler_kwargs` and `warmup_steps`.
      total_steps: Optimizer steps of the run.
      ratio: `warmup_ratio` of older transformers.
    Raises:
      ValueError: If jrl has no such schedule, or it takes no such argument.
    """
    name = word(args.lr_scheduler_type)
    if name not in SCHEDULES:
        raise ValueError(
            f"`lr_scheduler_type` must be one of {sorted(SCHEDULES)}, got {name!r}: give any other as "
            "`optimizers=(None, schedule)`, a function from the step to the learning rate."
        )
    kwargs = args.lr_scheduler_kwargs or {}
    if isinstance(kwargs, str):
        raise ValueError(
            f"`lr_scheduler_kwargs` must be a dict, or JSON that begins with a brace, got {kwargs!r}."
        )
    given, warmup = dict(kwargs), warmup_of(args, total_steps, ratio=ratio)
    # A run that ends within its warm-up never reaches the rate; what would have followed has no steps.
    found = SCHEDULES[name](warmup, max(total_steps, warmup + 1), given, args.learning_rate)
    if given:
        raise ValueError(f"`lr_scheduler_kwargs`: {name!r} takes no {sorted(given)}.")
    return found


def given_optimizer(
    config: FlatArguments,
    optimizers: tuple[Any, Any] | None,
    made_by: tuple[Callable[..., Any], Mapping[str, Any]] | None,
    total_steps: int,
) -> optax.GradientTransformation:
    """Translates `optimizers` or `optimizer_cls_and_kwargs`; the trainer clips gradients before.

    Args:
      config: Says what the script does not.
      optimizers: (optimizer, schedule), each perhaps None.
      made_by: (function or class, its arguments) that makes the optimizer.
      total_steps: Optimizer steps of the run.
    Raises:
      ValueError: If it can be neither taken nor translated.
    """
    transformation, schedule = optimizers or (None, None)
    named: Named | None = None
    if made_by is not None:
        make, kwargs = made_by
        if is_torch_optimizer(make):
            named = named_optimizer(make, kwargs)
        else:
            transformation = make(**kwargs)
    if is_torch_optimizer(transformation):
        named, transformation = named_optimizer(transformation), None
    if transformation is not None:
        if not isinstance(transformation, optax.GradientTransformation) or schedule is not None:
            raise ValueError(
                "`optimizers` must be (an optax transformation, None), (None, a function from the step to the "
                "learning rate), or torch's own; got "
                f"({type(transformation).__name__}, {type(schedule).__name__})."
            )
        return transformation
    if is_torch_schedule(schedule):
        schedule = tabulated(schedule, total_steps + 1)
    if schedule is not None and not callable(schedule):
        raise ValueError(f"`optimizers`: the schedule must be a function, got {type(schedule).__name__}.")
    section = optimizer_section(config)
    name, arguments = (section.name, section.kwargs) if named is None else named
    falling = scheduler_section(config, total_steps, ratio=config.warmup_ratio)
    rate = make_schedule(falling.name, falling.kwargs) if schedule is None else lambda _: schedule
    return make_optimizer(name, {"lr": config.learning_rate, **arguments}, rate, max_grad_norm=None)
