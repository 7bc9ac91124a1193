# SPDX-License-Identifier: Apache-2.0
"""What trlX's signatures take and what means nothing here: accepted, and said once."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, TypeVar

from jrl.trainers.config import TRLConfig
from jrl.trainers.loggers_trackers import MissingTrackerError, check_tracker

Config = TypeVar("Config", bound=TRLConfig)
_told: set[str] = set()


def warn_ignored(name: str, why: str) -> None:
    """Warns, the first time in this process, that an argument has no effect.

    Args:
      name: What was given, as its caller wrote it.
      why: The reason, or what does the work instead.
    """
    if name not in _told:
        _told.add(name)
        warnings.warn(f"`{name}` has no effect in jrl: {why}.", stacklevel=4)


def check_keywords(where: str, given: Mapping[str, Any], ignored: Mapping[str, str]) -> None:
    """Checks the keywords that an adapter takes for the sake of the seed's signature.

    Args:
      where: Method that got them.
      given: What it got and does not know.
      ignored: Names that mean nothing here, and why.
    Raises:
      TypeError: On any other name.
    """
    for name in given:
        if name not in ignored:
            raise TypeError(f"{where} got an unknown argument {name!r}; it ignores {sorted(ignored)}.")
        warn_ignored(f"{where}: {name}", ignored[name])


def without_missing_tracker(config: Config) -> Config:
    """The configuration, without its tracker where that is not installed.

    trlX tracks with wandb unless told otherwise, and brings it along; jrl has it as an extra. A script that never
    spoke of a tracker runs all the same, and is told what it goes without.
    """
    try:
        check_tracker(config.train.tracker)
    except MissingTrackerError as error:
        warnings.warn(f"{error} This run has the console and metrics.jsonl alone.", stacklevel=3)
        return config.evolve(train={"tracker": None})
    return config
