# SPDX-License-Identifier: Apache-2.0
"""RL post-training of language models in functional JAX/Flax."""

import importlib
import os
from typing import Any

# transformers would otherwise greet everybody who has no torch with a line that says models cannot be used.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

# A configuration knows these by name; `jrl.DDPOTrainer`, `jrl.DPOTrainer` and `jrl.RewardTrainer` are the other face of
# them.
import jrl.trainers.diffusion.ddpo
import jrl.trainers.dpo
import jrl.trainers.reward_model  # noqa: F401
from jrl import (
    data,
    distributed,
    environments,
    image_rewards,
    learners,
    losses,
    ops,
    rewards,
    rollout,
    typing,
)
from jrl.api import train
from jrl.data import (
    RecordStream,
    load_prompts,
    load_rewarded_samples,
    load_samples,
    load_tokenizer,
    read_records,
)
from jrl.learners.config import MethodConfig, OnlineConfig
from jrl.learners.grpo_config import GRPOConfig
from jrl.learners.ilql import ILQLConfig
from jrl.learners.ppo import PPOConfig
from jrl.learners.recipe import KLControl, Recipe
from jrl.learners.rft import RFTConfig
from jrl.learners.sft import SFTConfig
from jrl.losses.policy_gradient import PolicyLoss
from jrl.methods import (
    default_ddpo_config,
    default_dpo_config,
    default_grpo_config,
    default_ilql_config,
    default_ppo_config,
    default_reward_config,
    default_rft_config,
    default_sft_config,
)
from jrl.named_functions import load_function, load_image_reward, load_reward
from jrl.notebook import Model, estimate_cost, load_model, save_model
from jrl.trainers.base import Trainer
from jrl.trainers.config.defaults import default_config
from jrl.trainers.config.layouts import register_layout
from jrl.trainers.config.method import Footprint, Method, register
from jrl.trainers.config.overrides import apply_overrides
from jrl.trainers.config.registry import register_method, register_pipeline, register_trainer
from jrl.trainers.config.trl_config import (
    ModelConfig,
    OptimizerConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainConfig,
    TRLConfig,
)
from jrl.trainers.ilql import ILQLTrainer
from jrl.trainers.loading.reward_model import RewardModel, load_reward_model
from jrl.trainers.loading.setup import reward_mesh
from jrl.trainers.online import OnlineTrainer
from jrl.trainers.ppo import PPOTrainer
from jrl.trainers.rft import RFTTrainer
from jrl.trainers.sft import SFTTrainer
from jrl.trlx.old_layouts import LAYOUT
from jrl.version import __version__ as __version__

# Files and names of every trlX release are read wherever a configuration is.
register_layout(LAYOUT)

# Of TRL's shape, and imported when they are asked for: they bring transformers along, which takes seconds.
_FLAT = {
    "DDPOConfig": "jrl.trl.ddpo_config",
    "DDPOTrainer": "jrl.trl.ddpo",
    "DefaultDDPOStableDiffusionPipeline": "jrl.trl.ddpo_pipeline",
    "DPOConfig": "jrl.trl.configs",
    "DPOTrainer": "jrl.trl.dpo",
    "RewardConfig": "jrl.trl.configs",
    "RewardTrainer": "jrl.trl.reward",
}

__all__ = [
    "DDPOConfig",
    "DDPOTrainer",
    "DPOConfig",
    "DPOTrainer",
    "DefaultDDPOStableDiffusionPipeline",
    "Footprint",
    "GRPOConfig",
    "ILQLConfig",
    "ILQLTrainer",
    "KLControl",
    "Method",
    "MethodConfig",
    "Model",
    "ModelConfig",
    "OnlineConfig",
    "OnlineTrainer",
    "OptimizerConfig",
    "PPOConfig",
    "PPOTrainer",
    "PolicyLoss",
    "RFTConfig",
    "RFTTrainer",
    "Recipe",
    "RecordStream",
    "RewardConfig",
    "RewardModel",
    "RewardTrainer",
    "SFTConfig",
    "SFTTrainer",
    "SchedulerConfig",
    "TRLConfig",
    "TokenizerConfig",
    "TrainConfig",
    "Trainer",
    "apply_overrides",
    "data",
    "default_config",
    "default_ddpo_config",
    "default_dpo_config",
    "default_grpo_config",
    "default_ilql_config",
    "default_ppo_config",
    "default_reward_config",
    "default_rft_config",
    "default_sft_config",
    "distributed",
    "environments",
    "estimate_cost",
    "image_rewards",
    "learners",
    "load_function",
    "load_image_reward",
    "load_model",
    "load_prompts",
    "load_reward",
    "load_reward_model",
    "load_rewarded_samples",
    "load_samples",
    "load_tokenizer",
    "losses",
    "ops",
    "read_records",
    "register",
    "register_method",
    "register_pipeline",
    "register_trainer",
    "reward_mesh",
    "rewards",
    "rollout",
    "save_model",
    "train",
    "typing",
]


def __getattr__(name: str) -> Any:
    """A public name that was not imported with the others."""
    if name not in _FLAT:
        raise AttributeError(f"module 'jrl' has no attribute {name!r}")
    return getattr(importlib.import_module(_FLAT[name]), name)
