# SPDX-License-Identifier: Apache-2.0
"""A sweep's YAML file: what is searched, by which of Ray's searchers and schedulers, for which metric."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jrl.suggestions import did_you_mean
from jrl.sweep.space import Parameter, parse_parameter
from jrl.trainers.config.coercion import field_types, read_yaml
from jrl.trainers.config.layouts import full_name
from jrl.trainers.config.registry import METHODS
from jrl.trainers.config.trl_config import TRLConfig

# Our names, trlX's and Ray's own -> Ray's own. Population-based training is not among them: it changes the
# hyperparameters of a run that has begun, and a run of jrl goes on under its own only.
SCHEDULERS = {
    "fifo": "fifo",
    "asha": "asynchyperband",
    "asynchyperband": "asynchyperband",
    "async_hyperband": "asynchyperband",
    "hyperband": "hyperband",
    "hyperbandforbohb": "hb_bohb",
    "hb_bohb": "hb_bohb",
    "medianstopping": "medianstopping",
    "median_stopping_rule": "medianstopping",
}
SEARCHERS = ("random", "ax", "bayesopt", "bohb", "hebo", "hyperopt", "nevergrad", "optuna", "zoopt")
# A trial's own count of evaluations; unlike Ray's count of reports it goes on where a paused trial goes on.
TIME = "evaluation"


class SweepError(RuntimeError):
    """A sweep that could not be carried out."""


@dataclass(frozen=True)
class Named:
    """A searcher or scheduler.

    Attributes:
      name: Ray's.
      arguments: Of its constructor.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SweepPlan:
    """A sweep.

    Attributes:
      metric: Name in the records of evaluations; training metrics of the same step count too.
      mode: "max" or "min".
      parameters: Dotted name → what is searched.
      fixed: Dotted name → the value that all trials have.
      num_samples: Trials, or passes over the grid where there is one.
      search_alg: Ray's searcher.
      scheduler: Ray's scheduler.
      max_concurrent_trials: Most trials at once; None: as many as there is room for.
      time_budget_s: Seconds after which no trial goes on; None: no limit.
      seed: Of the draws.
    """

    metric: str
    mode: str
    parameters: dict[str, Parameter]
    fixed: dict[str, Any]
    num_samples: int = 1
    search_alg: Named = field(default_factory=lambda: Named("random"))
    scheduler: Named = field(default_factory=lambda: Named("fifo"))
    max_concurrent_trials: int | None = None
    time_budget_s: float | None = None
    seed: int = 0

    @property
    def num_trials(self) -> int:
        """Number of trials that the sweep will run."""
        grid = [len(parameter.values) for parameter in self.parameters.values() if parameter.is_grid]
        total = self.num_samples
        for size in grid:
            total *= size
        return total


def read_plan(path: str | os.PathLike[str]) -> SweepPlan:
    """Reads a sweep's file: `tune_config`, and one entry for each dotted hyperparameter.

    Args:
      path: Of a YAML file. An entry is `{strategy, values}`; a plain value is the same for all trials.
    Raises:
      FileNotFoundError: If there is no such file.
      ValueError: If a name, a strategy, a count of values, or anything else in it is not what it must be.
    """
    content = read_yaml(path)
    if not isinstance(content, Mapping) or not isinstance(content.get("tune_config"), Mapping):
        raise ValueError(f"{path} must hold `tune_config` and one entry for each hyperparameter.")
    try:
        return parse_plan(content["tune_config"], {k: v for k, v in content.items() if k != "tune_config"})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def parse_plan(settings: Mapping[str, Any], entries: Mapping[str, Any]) -> SweepPlan:
    """The plan of a file's content.

    Args:
      settings: `tune_config`.
      entries: The rest.
    Raises:
      ValueError: As `read_plan`.
    """
    known = [name for name in field_types(SweepPlan) if name not in ("parameters", "fixed")]
    for name in settings:
        if name not in known:
            raise ValueError(
                f"unknown field `tune_config.{name}`; there are {known}.{did_you_mean(name, known)}"
            )
    for name in ("metric", "mode"):
        if not isinstance(settings.get(name), str):
            raise ValueError(
                f"`tune_config.{name}` is required and must be a text, got {settings.get(name)!r}."
            )
    if settings["mode"] not in ("max", "min"):
        raise ValueError(f'`tune_config.mode` must be "max" or "min", got {settings["mode"]!r}.')
    _check_settings(settings)
    entries = {full_name(name, _known_fields()): entry for name, entry in entries.items()}
    for name in entries:
        check_hyperparameter(name)
    searched = {name: entry for name, entry in entries.items() if _is_searched(entry)}
    if not searched:
        raise ValueError("no hyperparameter has `strategy` and `values`: there is nothing to search.")
    plan = SweepPlan(
        **{name: value for name, value in settings.items() if name not in ("search_alg", "scheduler")},
        parameters={name: parse_parameter(name, entry) for name, entry in searched.items()},
        fixed={name: entry for name, entry in entries.items() if name not in searched},
        search_alg=_named(settings, "search_alg", "random", {name: name for name in SEARCHERS}),
        scheduler=_named(settings, "scheduler", "fifo", SCHEDULERS),
    )
    _check_together(plan)
    return plan


def _known_fields() -> dict[str, set[str]]:
    """Section → its fields, those of all methods together."""
    sections = {name: set(field_types(cls)) for name, cls in field_types(TRLConfig).items()}
    return sections | {"method": {field for cls in METHODS.values() for field in field_types(cls)}}


def check_hyperparameter(name: str) -> None:
    """Refuses a dotted name that no configuration has.

    Raises:
      ValueError: Naming the closest one.
    """
    sections = field_types(TRLConfig)
    section, _, path = name.partition(".")
    if section not in sections or not path:
        raise ValueError(
            f"`{name}` must be a dotted name in one of the sections {list(sections)}, such as "
            f"`optimizer.kwargs.lr`.{did_you_mean(section, sections)}"
        )
    known = sorted(_known_fields()[section])
    found = path.partition(".")[0]
    if found not in known:
        raise ValueError(
            f"unknown hyperparameter `{name}`: `{section}` has no field `{found}`.{did_you_mean(found, known)}"
        )


def check_arguments(named: Named, accepts: Callable[..., Any], taken: Iterable[str], *, where: str) -> None:
    """Refuses arguments that Ray's class does not take.

    Args:
      named: The searcher or scheduler.
      accepts: Its class.
      taken: Arguments that the sweep gives itself.
      where: Name of the field.
    Raises:
      ValueError: Naming the closest one.
    """
    known = [name for name in inspect.signature(accepts).parameters if name not in set(taken)]
    for name in named.arguments:
        if name not in known:
            raise ValueError(
                f"`tune_config.{where}`: {named.name} has no argument `{name}`; it takes {known}."
                f"{did_you_mean(name, known)}"
            )


def _is_searched(entry: Any) -> bool:
    return isinstance(entry, Mapping) and bool({"strategy", "values"} & set(entry))


def _check_settings(settings: Mapping[str, Any]) -> None:
    """Types and ranges of the numbers; those that may be None are limits."""
    for name, least, kinds, is_limit in (
        ("num_samples", 1, int, False),
        ("seed", 0, int, False),
        ("max_concurrent_trials", 1, int, True),
        ("time_budget_s", 1, int | float, True),
    ):
        if name not in settings or (is_limit and settings[name] is None):
            continue
        value = settings[name]
        if not isinstance(value, kinds) or isinstance(value, bool) or value < least:
            kind = "a whole number" if kinds is int else "a number"
            raise ValueError(f"`tune_config.{name}` must be {kind} of at least {least}, got {value!r}.")


def _named(settings: Mapping[str, Any], where: str, default: str, known: Mapping[str, str]) -> Named:
    """A searcher or scheduler: its name, or a mapping of its name and arguments."""
    given = settings.get(where) or default
    arguments = dict(given) if isinstance(given, Mapping) else {"name": given}
    name = arguments.pop("name", None)
    for argument, value in arguments.items():
        if any(mark in text for text in _texts(value) for mark in ":/\\"):
            raise ValueError(
                f"`tune_config.{where}.{argument}` must name no file, host or module, got {value!r}: a file of "
                "settings names none."
            )
    if not isinstance(name, str) or name.lower() not in known:
        raise ValueError(
            f"`tune_config.{where}` must be one of {', '.join(known)}, or a mapping of such a `name` and arguments, "
            f"got {given!r}.{did_you_mean(name, known)}"
        )
    return Named(known[name.lower()], arguments)


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value of YAML."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for entry in (*value, *value.values()) for text in _texts(entry))
    elif isinstance(value, list):
        yield from (text for entry in value for text in _texts(entry))


def _check_together(plan: SweepPlan) -> None:
    searcher, scheduler = plan.search_alg.name, plan.scheduler.name
    grids = [name for name, parameter in plan.parameters.items() if parameter.is_grid]
    if grids and searcher != "random":
        raise ValueError(
            f"`{grids[0]}`: only `search_alg: random` walks a grid, got {searcher!r}; `choice` draws from a list."
        )
    if (searcher == "bohb") != (scheduler == "hb_bohb"):
        raise ValueError(
            "`search_alg: bohb` and `scheduler: hyperbandforbohb` only work together, got "
            f"{searcher!r} and {scheduler!r}."
        )
    if searcher == "bayesopt":
        others = [name for name, parameter in plan.parameters.items() if parameter.strategy != "uniform"]
        if others:
            raise ValueError(
                f"`{others[0]}`: bayesopt searches `uniform` intervals only, got "
                f"{plan.parameters[others[0]].strategy!r}; optuna and hyperopt take every strategy."
            )
