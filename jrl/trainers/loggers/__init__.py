# SPDX-License-Identifier: Apache-2.0
"""Records of a run: console, JSON lines, trackers, health rules."""

from jrl.trainers.loggers.jsonl import SAMPLING
from jrl.trainers.loggers.loggers import Logger
from jrl.trainers.loggers.trackers import (
    PACKAGES,
    MissingTrackerError,
    TensorBoardLogger,
    WandbLogger,
    check_tracker,
)
from jrl.trainers.loggers.watch import RULES, Watch, say

__all__ = [
    "PACKAGES",
    "RULES",
    "SAMPLING",
    "Logger",
    "MissingTrackerError",
    "TensorBoardLogger",
    "WandbLogger",
    "Watch",
    "check_tracker",
    "say",
]
