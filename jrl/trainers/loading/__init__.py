# SPDX-License-Identifier: Apache-2.0
"""Models of a run: loaded, split into trained and frozen parts, exported."""

from jrl.trainers.loading.adapters import plan_adapter
from jrl.trainers.loading.denoiser import check_guidance
from jrl.trainers.loading.export import model_writer
from jrl.trainers.loading.reward_model import RewardModel, load_reward_model
from jrl.trainers.loading.setup import (
    ADAPTER_STREAM,
    COMPUTE_DTYPES,
    PolicyBundle,
    default_compute_dtype,
    load_policy,
    mesh_of,
    reward_mesh,
)
from jrl.trainers.loading.tokenizers import tokenizer_home

__all__ = [
    "ADAPTER_STREAM",
    "COMPUTE_DTYPES",
    "PolicyBundle",
    "RewardModel",
    "check_guidance",
    "default_compute_dtype",
    "load_policy",
    "load_reward_model",
    "mesh_of",
    "model_writer",
    "plan_adapter",
    "reward_mesh",
    "tokenizer_home",
]
