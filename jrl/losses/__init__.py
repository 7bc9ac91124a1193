# SPDX-License-Identifier: Apache-2.0
"""Objectives: pure functions of arrays that return `(loss_sum, weight, metrics)`."""

from jrl.losses.ilql import (
    ILQLPredictions,
    awac_weights,
    bellman_targets,
    conservative_loss,
    expectile_loss,
    ilql_loss,
    q_loss,
)
from jrl.losses.ppo import PPOTargets, ppo_loss
from jrl.losses.sft import sft_loss

__all__ = [
    "ILQLPredictions",
    "PPOTargets",
    "awac_weights",
    "bellman_targets",
    "conservative_loss",
    "expectile_loss",
    "ilql_loss",
    "ppo_loss",
    "q_loss",
    "sft_loss",
]
