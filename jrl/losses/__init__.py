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
from jrl.losses.policy_gradient import (
    KLTerm,
    Surrogate,
    Targets,
    ValueLoss,
    clipped,
    policy_gradient_loss,
    reinforce,
)
from jrl.losses.ppo import ppo_loss
from jrl.losses.reward_model import centering_loss, pairwise_loss, reward_model_loss
from jrl.losses.sft import sft_loss
from jrl.ops.ratios import token_ratio

__all__ = [
    "Completion",
    "ILQLPredictions",
    "KLTerm",
    "Surrogate",
    "Targets",
    "ValueLoss",
    "awac_weights",
    "bellman_targets",
    "centering_loss",
    "clipped",
    "conservative_loss",
    "ddpo_loss",
    "dpo_loss",
    "expectile_loss",
    "ilql_loss",
    "implicit_rewards",
    "pairwise_loss",
    "policy_gradient_loss",
    "ppo_loss",
    "q_loss",
    "reinforce",
    "reward_model_loss",
    "sft_loss",
    "token_ratio",
]
