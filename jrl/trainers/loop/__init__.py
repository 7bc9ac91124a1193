# SPDX-License-Identifier: Apache-2.0
"""The loop around an algorithm: steps, metrics, signals, clocks."""

from jrl.trainers.loop.activity import says_what_takes_long
from jrl.trainers.loop.hooks import Hooks
from jrl.trainers.loop.metrics_queue import TrainingDivergedError
from jrl.trainers.loop.run import Run
from jrl.trainers.loop.stopwatch import Stopwatch

__all__ = [
    "Hooks",
    "Run",
    "Stopwatch",
    "TrainingDivergedError",
    "says_what_takes_long",
]
