# SPDX-License-Identifier: Apache-2.0
"""PPO's entry in the table of methods."""

from __future__ import annotations

from jrl.learners.ppo import PPOConfig, ppo_recipe
from jrl.trainers.config.defaults import default_config
from jrl.trainers.config.method import Method
from jrl.trainers.config.sections import ModelConfig
from jrl.trainers.config.trl_config import TRLConfig


def default_ppo_config() -> TRLConfig:
    """trlX's default PPO run: GPT-2 fine-tuned on IMDB, two layers unfrozen."""
    model = ModelConfig("lvwerra/gpt2-imdb", num_layers_unfrozen=2)
    return default_config(PPOConfig(), trainer="PPOTrainer", model=model, total_steps=10000)


PPO = Method(
    name="ppo",
    config=PPOConfig,
    recipe=ppo_recipe,
    default=default_ppo_config,
    title="proximal policy optimisation (PPO)",
    summary="online PPO against a reward function",
    tags=("ppo", "reinforcement-learning"),
    papers=lambda method: ("schulman2017proximal", "ziegler2019fine"),
    # TRL's. At 0.001 a small model at the rate that suits it leaves its language: see `docs/ppo.md`.
    unasked={"init_kl_coef": 0.05},
    headlines={"ppo/clip_fraction": "clip", "ppo/entropy": "entropy"},
)
