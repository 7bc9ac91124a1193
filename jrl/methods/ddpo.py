# SPDX-License-Identifier: Apache-2.0
"""DDPO's entry in the table of methods."""

from __future__ import annotations

from jrl.learners.ddpo_config import DDPOConfig
from jrl.trainers.config.defaults import default_config
from jrl.trainers.config.method import Footprint, Method
from jrl.trainers.config.sections import ModelConfig
from jrl.trainers.config.trl_config import TRLConfig


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
    config = default_config(
        method, trainer="DDPOTrainer", model=model, lr=3e-4, total_steps=10000, batch_size=128
    )
    return config.evolve(
        optimizer={"kwargs": {"betas": [0.9, 0.999], "weight_decay": 1e-4}},
        scheduler={"name": "constant", "kwargs": {}},
        train={"minibatch_size": 8, "max_grad_norm": 1.0, "seed": 42},
    )


def _footprint(config: TRLConfig) -> Footprint:
    assert isinstance(config.method, DDPOConfig), "the entry's own"
    return Footprint(passes_per_sample=config.method.num_trained_steps)


DDPO = Method(
    name="ddpo",
    config=DDPOConfig,
    default=default_ddpo_config,
    title="denoising diffusion policy optimisation (DDPO)",
    summary="reinforcement learning of a diffusion model; --help lists its fields",
    tags=("ddpo", "reinforcement-learning", "diffusion"),
    papers=lambda method: ("black2023training",),
    data="images",
    model="diffusion",
    footprint=_footprint,
    headlines={"ddpo/kl": "kl", "ddpo/clip_fraction": "clip"},
    own_tokens=True,
    scales_loss=True,
)
