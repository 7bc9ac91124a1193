# SPDX-License-Identifier: Apache-2.0
"""The default configuration of each algorithm: trlX's where it has one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jrl.learners.config import MethodConfig
from jrl.learners.ddpo_config import DDPOConfig
from jrl.learners.dpo_config import DPOConfig
from jrl.learners.ilql import ILQLConfig
from jrl.learners.ppo import PPOConfig
from jrl.learners.reward_model_config import RewardConfig
from jrl.learners.rft import RFTConfig
from jrl.learners.sft import SFTConfig
from jrl.trainers.config import TRLConfig
from jrl.trainers.sections import (
    ModelConfig,
    OptimizerConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainConfig,
)


def default_ppo_config() -> TRLConfig:
    """trlX's default PPO run: GPT-2 fine-tuned on IMDB, two layers unfrozen."""
    model = ModelConfig("lvwerra/gpt2-imdb", num_layers_unfrozen=2)
    return _default("PPOTrainer", PPOConfig(), model, lr=3e-5, total_steps=10000, batch_size=32)


def default_ilql_config() -> TRLConfig:
    """trlX's default ILQL run: GPT-2, all layers, two Q heads."""
    config = _default(
        "ILQLTrainer", ILQLConfig(), ModelConfig("gpt2"), lr=5e-5, total_steps=1000, batch_size=128
    )
    return config.evolve(train={"seq_length": 64, "checkpoint_interval": 1000})


def default_sft_config() -> TRLConfig:
    """trlX's default SFT run: GPT-2, all layers."""
    return _default("SFTTrainer", SFTConfig(), ModelConfig("gpt2"), lr=1e-4, total_steps=1000, batch_size=8)


def default_rft_config() -> TRLConfig:
    """Rejection fine-tuning of the model that the default PPO run starts from; trlX has no default of it."""
    model = ModelConfig("lvwerra/gpt2-imdb")
    return _default("RFTTrainer", RFTConfig(), model, lr=3e-5, total_steps=1000, batch_size=32)


def default_dpo_config() -> TRLConfig:
    """DPO of GPT-2, all layers, at TRL's learning rate."""
    return _default("DPOTrainer", DPOConfig(), ModelConfig("gpt2"), lr=1e-6, total_steps=1000, batch_size=8)


def default_reward_config() -> TRLConfig:
    """A reward model on GPT-2, all layers, at TRL's learning rate."""
    model = ModelConfig("gpt2")
    return _default("RewardTrainer", RewardConfig(), model, lr=1e-4, total_steps=1000, batch_size=8)


def default_ddpo_config() -> TRLConfig:
    """DDPO of Stable Diffusion 1.5 by an adapter of rank 4, at TRL's learning rate; 256 samples an epoch."""
    peft_config = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 4,
        "target_modules": ["to_q", "to_k", "to_v", "to_out.0"],
        "init_lora_weights": "gaussian",
    }
    model = ModelConfig("stable-diffusion-v1-5/stable-diffusion-v1-5", peft_config=peft_config)
    method = DDPOConfig(sample_batch_size=32, sample_num_batches_per_epoch=8)
    config = _default("DDPOTrainer", method, model, lr=3e-4, total_steps=10000, batch_size=128)
    return config.evolve(
        optimizer={"kwargs": {"betas": [0.9, 0.999], "weight_decay": 1e-4}},
        scheduler={"name": "constant", "kwargs": {}},
        tokenizer={"tokenizer_path": model.model_path},
        train={"minibatch_size": 8, "max_grad_norm": 1.0, "seed": 42},
    )


def _default(
    trainer: str, method: MethodConfig, model: ModelConfig, *, lr: float, total_steps: int, batch_size: int
) -> TRLConfig:
    """What trlX's default runs have in common. The rate is constant: it falls to itself."""
    return TRLConfig(
        method=method,
        model=model,
        optimizer=OptimizerConfig(
            "adamw", {"lr": lr, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 1e-6}
        ),
        scheduler=SchedulerConfig("cosine_annealing", {"T_max": 1e12, "eta_min": lr}),
        tokenizer=TokenizerConfig("gpt2"),
        train=TrainConfig(
            total_steps=total_steps,
            seq_length=1024,
            epochs=100,
            batch_size=batch_size,
            checkpoint_interval=10000,
            eval_interval=100,
            trainer=trainer,
        ),
    )


DEFAULTS: Mapping[type[MethodConfig], Callable[[], TRLConfig]] = {
    PPOConfig: default_ppo_config,
    ILQLConfig: default_ilql_config,
    SFTConfig: default_sft_config,
    RFTConfig: default_rft_config,
    DPOConfig: default_dpo_config,
    RewardConfig: default_reward_config,
    DDPOConfig: default_ddpo_config,
}
"""By class of the method."""
