# SPDX-License-Identifier: Apache-2.0
"""Objectives: pure functions of arrays that return `(loss_sum, weight, metrics)`."""

from jrl.losses.ddpo import ddpo_loss
from jrl.losses.dpo import Completion, dpo_loss, implicit_rewards
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
from jrl.losses.reward_model import centring_loss, pairwise_loss, reward_model_loss
from jrl.losses.sft import sft_loss

__all__ = [
    "Completion",
    "ILQLPredictions",
    "PPOTargets",
    "awac_weights",
    "bellman_targets",
    "centring_loss",
    "conservative_loss",
    "ddpo_loss",
    "dpo_loss",
    "expectile_loss",
    "ilql_loss",
    "implicit_rewards",
    "pairwise_loss",
    "ppo_loss",
    "q_loss",
    "reward_model_loss",
    "sft_loss",
]
