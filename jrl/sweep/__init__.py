# SPDX-License-Identifier: Apache-2.0
"""Hyperparameter sweeps of a script on Ray Tune: trlX's YAML, Ray's searchers and schedulers, jrl's records."""

from jrl.sweep.plan import SweepError, SweepPlan, read_plan
from jrl.sweep.results import TrialResult

__all__ = ["SweepError", "SweepPlan", "TrialResult", "read_plan"]
