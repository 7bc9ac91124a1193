# SPDX-License-Identifier: Apache-2.0
"""Entry of reward gradients (DRaFT) in the table of methods."""

from __future__ import annotations

from jrl.learners.reward_gradient_config import RewardGradientConfig
from jrl.methods.ddpo import default_ddpo_config
from jrl.trainers.config.method import Footprint, Method
from jrl.trainers.config.trl_config import TRLConfig


def default_reward_gradient_config() -> TRLConfig:
    """DRaFT-1 of Stable Diffusion 1.5 by an adapter of rank 4: 16 images an optimizer step."""
    config = default_ddpo_config()
    return TRLConfig(
        method=RewardGradientConfig(),
        model=config.model,
        optimizer=config.optimizer,
        scheduler=config.scheduler,
        tokenizer=config.tokenizer,
        train=config.train,
    ).evolve(
        train={
            "trainer": "RewardGradientTrainer",
            "total_steps": 2000,
            "epochs": 2000,
            "batch_size": 16,
            "minibatch_size": 4,
        }
    )


REWARD_GRADIENT = Method(
    name="reward_gradient",
    config=RewardGradientConfig,
    default=default_reward_gradient_config,
    title="reward gradients (DRaFT)",
    summary="gradients of a differentiable reward through a diffusion model (DRaFT)",
    tags=("draft", "diffusion"),
    papers=lambda method: ("clark2023directly",),
    data="drawn",
    model="diffusion",
    footprint=lambda config: Footprint(),
    headlines={"reward/std": "std"},
)
