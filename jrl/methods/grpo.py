# SPDX-License-Identifier: Apache-2.0
"""GRPO's entry in the table of methods; its relatives are values of the same configuration."""

from __future__ import annotations

from jrl.learners.grpo import grpo_recipe
from jrl.learners.grpo_algorithms import ALGORITHMS
from jrl.learners.grpo_config import GRPOConfig
from jrl.trainers.config.defaults import default_config
from jrl.trainers.config.method import Method
from jrl.trainers.config.trl_config import TRLConfig


def default_grpo_config() -> TRLConfig:
    """A run of GPT-2 on 16 prompts an iteration, 8 samples of each, in one optimizer step."""
    return default_config(GRPOConfig(), batch_size=128)


GRPO = Method(
    name="grpo",
    config=GRPOConfig,
    recipe=grpo_recipe,
    default=default_grpo_config,
    title="group-relative policy optimisation (GRPO)",
    summary="policy gradients without a critic (GRPO, RLOO, DAPO, ...) against a reward function",
    tags=("grpo", "reinforcement-learning"),
    papers=lambda config: ("shao2024deepseekmath",),
    # `jrl grpo` begins with jrl's own defaults.
    variants={name: fields for name, fields in ALGORITHMS.items() if name != "grpo"},
    sizes=("num_generations",),
    # Of the recipes for small models, which take 2e-4 to 3e-4; walks on a graph are learned as well at it as at 1e-3.
    fastest_rate=3e-4,
    headlines={"grpo/clip_fraction": "clip", "grpo/entropy": "entropy"},
)
