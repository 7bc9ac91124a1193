# SPDX-License-Identifier: Apache-2.0
"""trlX's small helpers: seeds, clocks, numbers on a screen, and optimizers and schedules by name."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib.util
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import optax

from jrl.interop import set_seed
from jrl.learners import optimizers

__all__ = [
    "Clock",
    "OptimizerName",
    "SchedulerName",
    "filter_non_scalars",
    "get_optimizer_class",
    "get_scheduler_class",
    "infinite_dataloader",
    "is_peft_available",
    "print_rank_0",
    "set_seed",
    "significant",
    "to_device",
    "tree_map",
]


class OptimizerName(enum.StrEnum):
    """Names of trlX's optimizers; `optimizer.name` takes more. The 8-bit ones are refused by name."""

    ADAM = "adam"
    ADAMW = "adamw"
    ADAM_8BIT_BNB = "adam_8bit_bnb"
    ADAMW_8BIT_BNB = "adamw_8bit_bnb"
    SGD = "sgd"


class SchedulerName(enum.StrEnum):
    """Names of trlX's schedules; `scheduler.name` takes more."""

    COSINE_ANNEALING = "cosine_annealing"
    LINEAR = "linear"


def get_optimizer_class(name: str) -> Callable[..., optax.GradientTransformation]:
    """Factory of a named optimizer, `(lr, **kwargs) -> optax.GradientTransformation`, at a constant rate.

    Raises:
      ValueError: If there is none of this name.
    """
    if name.lower() not in optimizers.OPTIMIZERS and name.lower() not in list(OptimizerName):
        raise ValueError(f"`name` must be one of {', '.join(sorted(optimizers.OPTIMIZERS))}, got {name!r}.")

    def make(*, lr: float, **kwargs: Any) -> optax.GradientTransformation:
        schedule = optimizers.make_schedule("constant", {})
        return optimizers.make_optimizer(name, {"lr": lr, **kwargs}, schedule, max_grad_norm=None)

    return make


def get_scheduler_class(name: str) -> Callable[..., optimizers.Rate]:
    """Factory of a named schedule, `(**kwargs) -> (learning rate -> optimizer step -> learning rate)`.

    Raises:
      ValueError: If there is none of this name.
    """
    if name.lower() not in optimizers.SCHEDULES:
        raise ValueError(f"`name` must be one of {', '.join(sorted(optimizers.SCHEDULES))}, got {name!r}.")
    return lambda **kwargs: optimizers.make_schedule(name, kwargs)


class Clock:
    """Measures time between ticks, and how long a thousand samples take."""

    def __init__(self) -> None:
        self.start = time.time()
        self.total_time, self.total_samples = 0.0, 0

    def tick(self, samples: int = 0) -> float:
        """Seconds since the last tick, or since the clock was made.

        Args:
          samples: How many were worked on since; a tick without samples does not count in `get_stat`.
        """
        now = time.time()
        passed, self.start = now - self.start, now
        if samples:
            self.total_time += passed
            self.total_samples += samples
        return passed

    def get_stat(self, n_samp: int = 1000, reset: bool = False) -> float:
        """Seconds that `n_samp` samples take on average.

        Raises:
          ValueError: If no tick has counted samples yet.
        """
        if not self.total_samples:
            raise ValueError("`get_stat` needs a `tick(samples)` with at least one sample before it.")
        seconds = self.total_time / self.total_samples * n_samp
        if reset:
            self.total_time, self.total_samples = 0.0, 0
        return seconds


def significant(x: Any, ndigits: int = 2) -> Any:
    """A number rounded to `ndigits` digits after its first one; what is no number, NaN and 0 as they are."""
    x = x.item() if hasattr(x, "item") else x
    if not isinstance(x, int | float) or not math.isfinite(x) or x == 0:
        return x
    return round(x, ndigits - math.floor(math.log10(abs(x))))


def filter_non_scalars(xs: Mapping[str, Any]) -> dict[str, float]:
    """The entries that are numbers, as floats."""
    found = {}
    for name, value in xs.items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError):
            continue
    return found


def tree_map(f: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with `f` of every leaf; data classes, dicts, lists and tuples are its branches."""
    again = functools.partial(tree_map, f)
    if dataclasses.is_dataclass(tree):
        kind: Any = type(tree)
        return kind(**{name: again(value) for name, value in vars(tree).items()})
    if isinstance(tree, Mapping):
        return {name: again(value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(again(value) for value in tree)
    return f(tree)


def to_device(tree: Any, device: Any, non_blocking: bool = False) -> Any:
    """The tree with every array on a JAX device; placing never blocks."""
    del non_blocking
    return tree_map(lambda leaf: jax.device_put(leaf, device), tree)


def infinite_dataloader(dataloader: Iterable[Any], sampler: Any = None) -> Iterator[Any]:
    """Pass after pass over a loader; a `sampler` is told the number of each by its `set_epoch`."""
    epoch = 0
    while True:
        if sampler is not None:
            sampler.set_epoch(epoch)
        yield from dataloader
        epoch += 1


def print_rank_0(*message: Any) -> None:
    """Prints on the first process, as `RANK` tells it."""
    if os.environ.get("RANK", "0") == "0":
        print(*message)


def is_peft_available() -> bool:
    """True where PEFT is installed. jrl reads and writes its adapters without it."""
    return importlib.util.find_spec("peft") is not None
