# SPDX-License-Identifier: Apache-2.0
"""The search space: one strategy of trlX's for each dotted hyperparameter, checked before Ray is started."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jrl.suggestions import did_you_mean


@dataclass(frozen=True)
class Strategy:
    """Strategy by which values are drawn.

    Attributes:
      ray_name: The function of `ray.tune` that draws them.
      arguments: What `values` are, in order.
      optional: How many of the last ones may be left out.
      is_log: Whether the interval must be positive.
      is_integer: Whether bounds and steps are whole numbers.
    """

    ray_name: str
    arguments: tuple[str, ...]
    optional: int = 0
    is_log: bool = False
    is_integer: bool = False


_INTERVAL = ("lower", "upper")
STRATEGIES: dict[str, Strategy] = {
    "uniform": Strategy("uniform", _INTERVAL),
    "quniform": Strategy("quniform", (*_INTERVAL, "step")),
    "loguniform": Strategy("loguniform", (*_INTERVAL, "base"), optional=1, is_log=True),
    "qloguniform": Strategy("qloguniform", (*_INTERVAL, "step", "base"), is_log=True),
    "randn": Strategy("randn", ("mean", "deviation")),
    "qrandn": Strategy("qrandn", ("mean", "deviation", "step")),
    "randint": Strategy("randint", _INTERVAL, is_integer=True),
    "qrandint": Strategy("qrandint", (*_INTERVAL, "step"), is_integer=True),
    "lograndint": Strategy("lograndint", (*_INTERVAL, "base"), is_log=True, is_integer=True),
    "qlograndint": Strategy("qlograndint", (*_INTERVAL, "step", "base"), is_log=True, is_integer=True),
}
LISTS = {"choice": "choice", "grid": "grid_search", "grid_search": "grid_search"}


@dataclass(frozen=True)
class Parameter:
    """A hyperparameter of a sweep.

    Attributes:
      strategy: A name in `STRATEGIES` or `LISTS`.
      values: Its arguments, or the list itself.
    """

    strategy: str
    values: tuple[Any, ...]

    @property
    def is_grid(self) -> bool:
        """True where every value is tried."""
        return self.strategy in LISTS and LISTS[self.strategy] == "grid_search"

    @property
    def is_log(self) -> bool:
        """True where its values spread over orders of magnitude."""
        return self.strategy in STRATEGIES and STRATEGIES[self.strategy].is_log

    def domain(self, tune: Any) -> Any:
        """Search domain of `ray.tune`, which is given as an argument because it is an extra."""
        if self.strategy in LISTS:
            make: Callable[..., Any] = getattr(tune, LISTS[self.strategy])
            return make(list(self.values))
        rule = STRATEGIES[self.strategy]
        make = getattr(tune, rule.ray_name)
        # The base of the logarithm changes no draw; Ray has deprecated the argument.
        arguments = zip(rule.arguments, self.values, strict=False)
        return make(*(value for argument, value in arguments if argument != "base"))


def parse_parameter(name: str, entry: Any) -> Parameter:
    """A hyperparameter's entry in a sweep's file.

    Args:
      name: Dotted.
      entry: A mapping of `strategy` and `values`.
    Raises:
      ValueError: If it is no such mapping, the strategy is unknown, or the values are not what it takes.
    """
    if not isinstance(entry, Mapping) or set(entry) != {"strategy", "values"}:
        raise ValueError(
            f"`{name}` must have `strategy` and `values`, as in {{strategy: loguniform, values: [1.0e-6, 1.0e-3]}}, "
            f"got {entry!r}."
        )
    strategy, values = entry["strategy"], entry["values"]
    known = sorted((*STRATEGIES, *LISTS))
    if strategy not in known:
        raise ValueError(
            f"`{name}`: `strategy` must be one of {', '.join(known)}, got {strategy!r}."
            f"{did_you_mean(strategy, known)}"
        )
    if not isinstance(values, list | tuple):
        raise ValueError(f"`{name}`: `values` must be a list, got {values!r}.")
    if strategy in LISTS:
        if not values:
            raise ValueError(f"`{name}`: {strategy} needs at least one value, got none.")
    else:
        _check_numbers(name, strategy, values)
    return Parameter(strategy, tuple(values))


def _check_numbers(name: str, strategy: str, values: Sequence[Any]) -> None:
    """Count, type, order and sign of the numbers that a strategy takes."""
    rule = STRATEGIES[strategy]
    most = len(rule.arguments)
    if not most - rule.optional <= len(values) <= most:
        counts = f"{most - rule.optional} or {most}" if rule.optional else str(most)
        raise ValueError(
            f"`{name}`: {strategy} takes {counts} values ({', '.join(rule.arguments)}), got {len(values)}: "
            f"{list(values)}."
        )
    arguments = dict(zip(rule.arguments, values, strict=False))
    for argument, value in arguments.items():
        whole = rule.is_integer and argument != "base"
        number = isinstance(value, int) if whole else isinstance(value, int | float)
        if isinstance(value, bool) or not number or not math.isfinite(value):
            kind = "whole numbers" if rule.is_integer else "finite numbers"
            raise ValueError(f"`{name}`: {strategy} takes {kind}, got {value!r} for its {argument}.")
    if "upper" in arguments and not arguments["lower"] < arguments["upper"]:
        raise ValueError(
            f"`{name}`: the first value of {strategy} must be below the second, got {list(values)}."
        )
    positive = [word for word in ("deviation", "step") if word in arguments]
    for word in positive + (["lower"] if rule.is_log else []):
        if not arguments[word] > 0:
            raise ValueError(
                f"`{name}`: {strategy} needs a positive {word}, got {arguments[word]!r} in {list(values)}."
            )
    if "base" in arguments and not arguments["base"] > 1:
        raise ValueError(f"`{name}`: {strategy} needs a base above 1, got {arguments['base']!r}.")
