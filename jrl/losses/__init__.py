# SPDX-License-Identifier: Apache-2.0
"""Objectives: pure functions of arrays that return `(loss_sum, weight, metrics)`."""

from jrl.losses.ppo import PPOTargets, ppo_loss
from jrl.losses.sft import sft_loss

__all__ = ["PPOTargets", "ppo_loss", "sft_loss"]
