# SPDX-License-Identifier: Apache-2.0
"""The entry of reward models."""

from __future__ import annotations

from jrl.learners.reward_model_config import RewardConfig
from jrl.trainers.config.defaults import default_config
from jrl.trainers.config.method import Footprint, Method
from jrl.trainers.config.trl_config import TRLConfig


def default_reward_config() -> TRLConfig:
    """A reward model on GPT-2, all layers, at TRL's learning rate."""
    return default_config(RewardConfig(), trainer="RewardTrainer", lr=1e-4, batch_size=8)


REWARD_MODEL = Method(
    name="reward",
    config=RewardConfig,
    default=default_reward_config,
    title="reward modelling (pairs of a chosen and a rejected completion)",
    summary="a reward model from preferences; --help lists TRL's flat fields",
    tags=("reward-model",),
    papers=lambda method: ("ouyang2022training", "bradley1952rank"),
    data="pairs",
    model="classifier",
    footprint=lambda config: Footprint(rows_per_sample=2, reads_logits=False),
    headlines={
        "reward_model/loss": "loss",
        "reward_model/accuracy": "accuracy",
        "reward_model/margin": "margin",
    },
    own_tokens=True,
)
