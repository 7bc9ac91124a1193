# SPDX-License-Identifier: Apache-2.0
"""RL post-training of language models in functional JAX/Flax.

A name is imported when it is first asked for: JAX alone takes most of a second, and nobody needs all of jrl.
"""

import importlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any

from jrl.version import __version__ as __version__

if TYPE_CHECKING:
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
    from jrl.learners.reward_gradient_config import RewardGradientConfig
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
        default_reward_gradient_config,
        default_rft_config,
        default_sft_config,
    )
    from jrl.named_functions import load_function, load_image_reward, load_reward
    from jrl.notebook import Model, estimate_cost, load_model, save_model
    from jrl.trainers.base import Trainer
    from jrl.trainers.config.defaults import default_config
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
    from jrl.trainers.diffusion.aesthetic_reward import load_aesthetic_reward
    from jrl.trainers.diffusion.clip_reward import load_clip_reward
    from jrl.trainers.diffusion.reward_gradient import RewardGradientTrainer
    from jrl.trainers.ilql import ILQLTrainer
    from jrl.trainers.loading.reward_model import RewardModel, load_reward_model
    from jrl.trainers.loading.setup import reward_mesh
    from jrl.trainers.online import OnlineTrainer
    from jrl.trainers.ppo import PPOTrainer
    from jrl.trainers.rft import RFTTrainer
    from jrl.trainers.sft import SFTTrainer
    from jrl.trl.configs import DPOConfig, RewardConfig
    from jrl.trl.ddpo import DDPOTrainer
    from jrl.trl.ddpo_config import DDPOConfig
    from jrl.trl.ddpo_pipeline import DefaultDDPOStableDiffusionPipeline
    from jrl.trl.dpo import DPOTrainer
    from jrl.trl.reward import RewardTrainer
    from jrl.typing.diffusion import DifferentiableReward
    from jrl.upload import push_to_hub

# transformers would otherwise greet everybody who has no torch with a line that says models cannot be used.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

__all__ = [
    "DDPOConfig",
    "DDPOTrainer",
    "DPOConfig",
    "DPOTrainer",
    "DefaultDDPOStableDiffusionPipeline",
    "DifferentiableReward",
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
    "RewardGradientConfig",
    "RewardGradientTrainer",
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
    "default_reward_gradient_config",
    "default_rft_config",
    "default_sft_config",
    "distributed",
    "environments",
    "estimate_cost",
    "image_rewards",
    "learners",
    "load_aesthetic_reward",
    "load_clip_reward",
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
    "push_to_hub",
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

_HOMES = {
    "jrl.api": ("train",),
    "jrl.data": (
        "RecordStream",
        "load_prompts",
        "load_rewarded_samples",
        "load_samples",
        "load_tokenizer",
        "read_records",
    ),
    "jrl.learners.config": (
        "MethodConfig",
        "OnlineConfig",
    ),
    "jrl.learners.grpo_config": ("GRPOConfig",),
    "jrl.learners.ilql": ("ILQLConfig",),
    "jrl.learners.ppo": ("PPOConfig",),
    "jrl.learners.recipe": (
        "KLControl",
        "Recipe",
    ),
    "jrl.learners.reward_gradient_config": ("RewardGradientConfig",),
    "jrl.learners.rft": ("RFTConfig",),
    "jrl.learners.sft": ("SFTConfig",),
    "jrl.losses.policy_gradient": ("PolicyLoss",),
    "jrl.methods": (
        "default_ddpo_config",
        "default_dpo_config",
        "default_grpo_config",
        "default_ilql_config",
        "default_ppo_config",
        "default_reward_config",
        "default_reward_gradient_config",
        "default_rft_config",
        "default_sft_config",
    ),
    "jrl.named_functions": (
        "load_function",
        "load_image_reward",
        "load_reward",
    ),
    "jrl.notebook": (
        "Model",
        "estimate_cost",
        "load_model",
        "save_model",
    ),
    "jrl.trainers.base": ("Trainer",),
    "jrl.trainers.config.defaults": ("default_config",),
    "jrl.trainers.config.method": (
        "Footprint",
        "Method",
        "register",
    ),
    "jrl.trainers.config.overrides": ("apply_overrides",),
    "jrl.trainers.config.registry": (
        "register_method",
        "register_pipeline",
        "register_trainer",
    ),
    "jrl.trainers.config.trl_config": (
        "ModelConfig",
        "OptimizerConfig",
        "SchedulerConfig",
        "TRLConfig",
        "TokenizerConfig",
        "TrainConfig",
    ),
    "jrl.trainers.diffusion.aesthetic_reward": ("load_aesthetic_reward",),
    "jrl.trainers.diffusion.clip_reward": ("load_clip_reward",),
    "jrl.trainers.diffusion.reward_gradient": ("RewardGradientTrainer",),
    "jrl.trainers.ilql": ("ILQLTrainer",),
    "jrl.trainers.loading.reward_model": (
        "RewardModel",
        "load_reward_model",
    ),
    "jrl.trainers.loading.setup": ("reward_mesh",),
    "jrl.trainers.online": ("OnlineTrainer",),
    "jrl.trainers.ppo": ("PPOTrainer",),
    "jrl.trainers.rft": ("RFTTrainer",),
    "jrl.trainers.sft": ("SFTTrainer",),
    "jrl.trl.configs": (
        "DPOConfig",
        "RewardConfig",
    ),
    "jrl.trl.ddpo": ("DDPOTrainer",),
    "jrl.trl.ddpo_config": ("DDPOConfig",),
    "jrl.trl.ddpo_pipeline": ("DefaultDDPOStableDiffusionPipeline",),
    "jrl.trl.dpo": ("DPOTrainer",),
    "jrl.trl.reward": ("RewardTrainer",),
    "jrl.typing.diffusion": ("DifferentiableReward",),
    "jrl.upload": ("push_to_hub",),
}
"""Module → public names that it defines; the other public names are modules themselves."""
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """A public name, or a module of the package, imported now."""
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    if not name.startswith("_") and importlib.util.find_spec(f"jrl.{name}") is not None:
        return importlib.import_module(f"jrl.{name}")
    raise AttributeError(f"module 'jrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, and what the module holds already."""
    return sorted({*globals(), *__all__})
