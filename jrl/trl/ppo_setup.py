# SPDX-License-Identifier: Apache-2.0
"""Setup of `PPOTrainer` from its arguments: model, reference, schedule, optimizer; and its clock."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax

from jrl.interop import warn_ignored
from jrl.learners.optimizers import make_optimizer, make_schedule
from jrl.trainers.config import TRLConfig
from jrl.trl.handles import same_source, untrained
from jrl.trl.models import ModelHandle, resolve_model
from jrl.trl.torch_optimizers import is_torch_optimizer, is_torch_schedule, named_optimizer, tabulated

Optimizer = Any
"""optax's transformation, a name, a pair (name, arguments), or an optimizer of torch."""
Schedule = Callable[[Any], Any]
"""Number of the step → learning rate."""


class Clock:
    """Seconds between laps; a lap ends when the arrays that it made are there."""

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self._times: dict[str, float] = {}

    def lap(self, name: str, made: Any) -> None:
        """Ends a lap."""
        jax.block_until_ready(made)
        now = time.perf_counter()
        self._times[f"time/ppo/{name}"], self._last = now - self._last, now

    def times(self) -> dict[str, float]:
        """All laps, and their sum."""
        return self._times | {"time/ppo/total": time.perf_counter() - self._began}


def policy_handle(model: Any) -> ModelHandle:
    """The handle of what trains.

    Raises:
      ValueError: If it is none, or a classifier.
    """
    if model is None:
        raise ValueError(
            "`model` must be given: a handle of AutoModelForCausalLMWithValueHead.from_pretrained."
        )
    handle = resolve_model(model)
    if handle.kind == "classifier":
        raise ValueError("`model` must write text, got a sequence classifier.")
    peft_type = "LORA" if handle.peft_config is None else str(handle.peft_config.get("peft_type"))
    if peft_type.upper() != "LORA":
        raise ValueError(
            f"`peft_config` must be of LORA in a step-by-step PPO, got {peft_type}: `jrl.train` takes virtual tokens."
        )
    return untrained(handle)


def reference_handle(
    ref_model: Any, handle: ModelHandle, num_shared_layers: int | None
) -> ModelHandle | None:
    """The handle of the reference that was given; None where the model itself is the reference.

    Raises:
      ValueError: If it shares layers with another model.
    """
    if ref_model is None:
        return None
    reference = untrained(resolve_model(ref_model))
    if handle.is_peft_model:
        warn_ignored("ref_model", "beside an adapter the reference is the base model")
        return None
    if num_shared_layers is not None:
        warnings.warn("`num_shared_layers` has no effect beside a `ref_model`.", stacklevel=4)
    if reference.num_shared_layers is not None and not same_source(reference, handle):
        raise ValueError("`ref_model` with shared layers must be made of `model` (`create_reference_model`).")
    return reference


def checked_schedule(lr_scheduler: Any, optimizer: Any, num_steps: int) -> Schedule | None:
    """The schedule as it was given; one of torch as the table of its first `num_steps` rates.

    Raises:
      ValueError: If it cannot be traced, or stands beside an optimizer with a rate of its own.
    """
    if lr_scheduler is None:
        return None
    if is_torch_schedule(lr_scheduler):
        lr_scheduler = tabulated(lr_scheduler, max(num_steps, 1))
    if not callable(lr_scheduler):
        raise ValueError(
            "`lr_scheduler` must be a function from the number of the step to a learning rate, such as "
            f"optax.linear_schedule(...), got {type(lr_scheduler).__name__}."
        )
    if isinstance(optimizer, optax.GradientTransformation):
        raise ValueError(
            "`lr_scheduler` must be None beside an optax `optimizer`, which has its own learning rate."
        )
    try:
        jax.eval_shape(lr_scheduler, jax.ShapeDtypeStruct((), np.int32))
    except jax.errors.JAXTypeError as error:
        raise ValueError(
            "`lr_scheduler` must be traceable: compute with jax.numpy, not with `if`, `float` or the math module."
        ) from error
    schedule: Schedule = lr_scheduler
    return schedule


def with_optimizer(
    native: TRLConfig, optimizer: Optimizer
) -> tuple[TRLConfig, optax.GradientTransformation | None]:
    """The configuration with the optimizer in it, or the optimizer beside it where it is optax's own."""
    if optimizer is None:
        return native, None
    if isinstance(optimizer, optax.GradientTransformation):
        return native, optimizer
    if is_torch_optimizer(optimizer):
        optimizer = named_optimizer(optimizer)
    if not isinstance(optimizer, str | tuple | list):
        raise ValueError(
            "`optimizer` must be None, a name, a pair (name, arguments), an optax transformation or an optimizer of "
            f"torch, got {type(optimizer).__name__}."
        )
    name, kwargs = (optimizer, {}) if isinstance(optimizer, str) else optimizer
    values = {"lr": native.optimizer.kwargs["lr"], **kwargs}
    make_optimizer(name, values, make_schedule("constant", {}), max_grad_norm=None)
    changed = replace(native.optimizer, name=name, kwargs=values)
    return replace(native, optimizer=changed), None
