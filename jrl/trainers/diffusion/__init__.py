# SPDX-License-Identifier: Apache-2.0
"""Training of diffusion models."""

from jrl.trainers.diffusion.ddpo import DDPOTrainer
from jrl.trainers.diffusion.ddpo_gallery import Tracker
from jrl.trainers.diffusion.ddpo_prompts import (
    PromptFunction,
    PromptList,
    PromptRandomness,
    draw_prompts,
)
from jrl.trainers.diffusion.ddpo_rewards import Answers, RewardFunction
from jrl.trainers.diffusion.ddpo_sampling import to_host
from jrl.trainers.diffusion.diffusion_trainer import in_terms_of
from jrl.trainers.diffusion.images import to_pil

__all__ = [
    "Answers",
    "DDPOTrainer",
    "PromptFunction",
    "PromptList",
    "PromptRandomness",
    "RewardFunction",
    "Tracker",
    "draw_prompts",
    "in_terms_of",
    "to_host",
    "to_pil",
]
