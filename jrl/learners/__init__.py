# SPDX-License-Identifier: Apache-2.0
"""Learners: pure updates `(state, frozen, batch, key) -> (state, metrics)`, an online algorithm being a recipe."""

from jrl.learners.credit import (
    Credit,
    Scaling,
    generalized_advantages,
    penalize,
    returns_to_go,
    unpenalized,
)
from jrl.learners.groups import Selection, group_credit, whitened_credit
from jrl.learners.grpo import grpo_recipe
from jrl.learners.grpo_algorithms import ALGORITHMS, algorithm, switches
from jrl.learners.grpo_config import GRPOConfig
from jrl.learners.online import OnlineState, init_online_state, make_online_update
from jrl.learners.recipe import KLControl, Recipe, mean_loss
from jrl.losses.policy_gradient import PolicyLoss

__all__ = [
    "ALGORITHMS",
    "Credit",
    "GRPOConfig",
    "KLControl",
    "OnlineState",
    "PolicyLoss",
    "Recipe",
    "Scaling",
    "Selection",
    "algorithm",
    "generalized_advantages",
    "group_credit",
    "grpo_recipe",
    "init_online_state",
    "make_online_update",
    "mean_loss",
    "penalize",
    "returns_to_go",
    "switches",
    "unpenalized",
    "whitened_credit",
]
