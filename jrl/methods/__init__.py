# SPDX-License-Identifier: Apache-2.0
"""The algorithms: one entry each, which everything that must know of algorithms reads."""

from jrl.methods.ddpo import DDPO, default_ddpo_config
from jrl.methods.dpo import DPO, default_dpo_config
from jrl.methods.grpo import GRPO, default_grpo_config
from jrl.methods.ilql import ILQL, default_ilql_config
from jrl.methods.ppo import PPO, default_ppo_config
from jrl.methods.reward_gradient import REWARD_GRADIENT, default_reward_gradient_config
from jrl.methods.reward_model import REWARD_MODEL, default_reward_config
from jrl.methods.rft import RFT, default_rft_config
from jrl.methods.sft import SFT, default_sft_config
from jrl.trainers.config.method import register

for _method in (PPO, GRPO, RFT, ILQL, SFT, DPO, REWARD_MODEL, DDPO, REWARD_GRADIENT):
    register(_method)

__all__ = [
    "DDPO",
    "DPO",
    "GRPO",
    "ILQL",
    "PPO",
    "REWARD_GRADIENT",
    "REWARD_MODEL",
    "RFT",
    "SFT",
    "default_ddpo_config",
    "default_dpo_config",
    "default_grpo_config",
    "default_ilql_config",
    "default_ppo_config",
    "default_reward_config",
    "default_reward_gradient_config",
    "default_rft_config",
    "default_sft_config",
]
