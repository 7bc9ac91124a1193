# SPDX-License-Identifier: Apache-2.0
"""PPO's name among the trainers: the online trainer with PPO's recipe."""

from __future__ import annotations

from jrl.learners.ppo import PPOConfig
from jrl.trainers.config.registry import register_trainer
from jrl.trainers.online import OnlineTrainer
from jrl.typing import Params


@register_trainer("PPOTrainer")
class PPOTrainer(OnlineTrainer):
    """Online PPO against a frozen reference, with a value head."""

    ref_params: Params

    @property
    def method(self) -> PPOConfig:
        """The algorithm's section of the configuration."""
        return self.method_as(PPOConfig)
