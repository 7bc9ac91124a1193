# SPDX-License-Identifier: Apache-2.0
"""Defaults of trlX's configurations that a run here reads in its own way: trackers, special tokens."""

from __future__ import annotations

import warnings
from typing import TypeVar

from jrl.trainers.config import TRLConfig, entry_of
from jrl.trainers.loggers import MissingTrackerError, check_tracker

Config = TypeVar("Config", bound=TRLConfig)


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


def with_seed_prompts(config: Config) -> Config:
    """The configuration under trlX's rule: no special tokens before what a decoder reads.

    A run says so once, where the tokenizer would write some. Methods that trlX does not have keep their own rule.
    """
    entry = entry_of(config.method)
    if entry is not None and entry.own_tokens:
        return config
    return config.evolve(tokenizer={"add_special_tokens": False})
