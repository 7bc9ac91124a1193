# SPDX-License-Identifier: Apache-2.0
"""Tiny runs of DDPO: the toy denoiser as a whole diffusion model, prompts, a reward, a configuration."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jrl
from jrl.learners.ddpo import init_ddpo_state
from jrl.models.diffusion.pipeline import DiffusionModel
from jrl.models.families.base import Entry, table
from jrl.trainers.diffusion.ddpo import DDPOTrainer
from jrl.trainers.diffusion.ddpo_experience import Collector
from jrl.trainers.diffusion.ddpo_gallery import Gallery
from jrl.trainers.loop.hooks import Hooks
from tests.diffusion_toy import LATENT, PROMPT, SD_SCHEDULE, VOCABULARY, toy_denoiser, toy_frozen, toy_params

PROMPTS = ("red square", "blue circle", "green line")
STEPS = 3
"""Of denoising."""


@dataclass(frozen=True)
class ToyConfig:
    """Architecture of the toy denoiser."""

    in_channels: int = LATENT[-1]


@dataclass(frozen=True)
class ToyUNet:
    """The toy denoiser as a `Denoiser`; it has no adapter."""

    config: ToyConfig = field(default_factory=ToyConfig)
    folder_name = "unet"
    patch_size = 1

    def init(self, key: Any) -> Any:
        """Weights from the key."""
        return jax.tree.map(lambda leaf: jax.random.normal(key, leaf.shape), toy_params())

    def apply(
        self, params: Any, lora: Any, latents: Any, timesteps: Any, context: Any, *, dtype: Any, remat: bool
    ) -> Any:
        """The network."""
        assert lora is None
        del remat
        return toy_denoiser(dtype).predict(params, None, latents, timesteps, context)

    def bind_lora(self, config: Any) -> Any:
        """There is none."""
        raise ValueError(f"the toy has no adapters, got {config}.")

    def entries(self) -> list[Entry]:
        """Its tensors lie in the file as they lie here."""
        flat = jax.tree_util.tree_flatten_with_path(toy_params())[0]
        paths = [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in flat]
        return [Entry(path.replace("/", "."), (path,), table(), leaf.shape) for path, leaf in paths]

    def stored_config(self) -> dict[str, Any]:
        """Its config.json."""
        return {"in_channels": self.config.in_channels}


@dataclass(frozen=True)
class ToyVAE:
    """Three channels as colours, twice as large."""

    factor: int = 2
    channels: int = LATENT[-1]

    def decode(self, params: Any, latents: Any, *, dtype: Any) -> Any:
        """Images."""
        del dtype
        return toy_denoiser().decode(params, latents)


@dataclass(frozen=True)
class ToyEncoder:
    """A table."""

    width: int = 8

    def encode(self, params: Any, tokens: Any, *, dtype: Any) -> Any:
        """One row of the table for each id."""
        return jnp.take(params["embedding"], tokens, axis=0).astype(dtype)


def toy_tokenizer(texts: Sequence[str]) -> np.ndarray:
    """The first words of each text by the sum of their letters; 0 is padding."""
    rows = [[sum(map(ord, word)) % (VOCABULARY - 1) + 1 for word in text.split()][:PROMPT] for text in texts]
    return np.asarray([row + [0] * (PROMPT - len(row)) for row in rows], np.int32).reshape(-1, PROMPT)


def toy_model(seed: int = 0) -> DiffusionModel:
    """The toy as a whole model."""
    embedding = {"embedding": toy_frozen()["embedding"]}
    return DiffusionModel(
        name="toy",
        unet=ToyUNet(),
        vae=ToyVAE(),
        text_encoder=ToyEncoder(),
        tokenizer=toy_tokenizer,
        schedule=SD_SCHEDULE,
        weights={"unet": toy_params(seed), "vae": {}, "text_encoder": embedding},
        sample_size=LATENT[:2],
    )


def draw_prompt() -> tuple[str, dict[str, int]]:
    """One of three, from both global generators."""
    number = (random.randrange(len(PROMPTS)) + int(np.random.randint(len(PROMPTS)))) % len(PROMPTS)
    return PROMPTS[number], {"number": number}


def brightness(
    images: np.ndarray, prompts: tuple[str, ...], metadata: tuple[Any, ...]
) -> tuple[np.ndarray, dict[str, int]]:
    """Mean of all pixels."""
    assert len(images) == len(prompts) == len(metadata)
    return images.mean(axis=(1, 2, 3)), {"judged": len(images)}


def ddpo_config(run_dir: Path, **sections: dict[str, Any]) -> jrl.TRLConfig:
    """8 samples an epoch in calls of 4, three steps of denoising, two optimizer steps of two microbatches."""
    return (
        jrl.default_ddpo_config()
        .evolve(
            model={"model_path": "toy", "peft_config": None},
            optimizer={"kwargs": {"lr": 1e-3}},
            method={
                "sample_num_steps": STEPS,
                "sample_batch_size": 4,
                "sample_num_batches_per_epoch": 2,
                "sample_guidance_scale": 2.0,
                "train_clip_range": 0.1,
                "per_prompt_stat_tracking": True,
                "per_prompt_stat_tracking_buffer_size": 4,
                "per_prompt_stat_tracking_min_count": 2,
            },
            train={
                "epochs": 4,
                "batch_size": 4,
                "minibatch_size": 2,
                "eval_interval": 4,
                "checkpoint_interval": 100,
                "checkpoint_dir": str(run_dir),
                "seed": 3,
            },
        )
        .evolve(**sections)
    )


def make(
    run_dir: Path, *, reward: Any = brightness, hook: Any = None, **sections: dict[str, Any]
) -> DDPOTrainer:
    """A trainer of the toy."""
    return trainer_of(ddpo_config(run_dir, **sections), reward=reward, hook=hook)


def trainer_of(config: jrl.TRLConfig, *, reward: Any, hook: Any = None) -> DDPOTrainer:
    """The same from a configuration."""
    return DDPOTrainer(
        config,
        reward_function=reward,
        prompt_function=draw_prompt,
        model=toy_model(),
        image_samples_hook=hook,
    )


def again(
    trainer: DDPOTrainer, run_dir: Path, *, reward: Any = None, hook: Any = None, **sections: Any
) -> DDPOTrainer:
    """The same trainer as it was at its start, with its compiled programs, in another folder.

    Args:
      trainer: Made by `make`; it may have been trained.
      run_dir: Of the new run.
      reward: Another reward function.
      hook: Another hook.
      sections: Further changes of the configuration, of what no program depends on.
    """
    fresh = copy.copy(trainer)
    fresh.config = trainer.config.evolve(train={"checkpoint_dir": str(run_dir)}).evolve(**sections)
    fresh.run_dir, fresh.history, fresh.hooks = run_dir, [], Hooks()
    fresh.reward_function, fresh.image_samples_hook = reward or brightness, hook
    fresh.gallery = Gallery(fresh.config.train, run_dir)
    fresh.memory = Collector.fresh_memory(fresh.config.train.seed)
    start = init_ddpo_state({"unet": toy_model().weights["unet"]}, fresh.make_optimizer(), fresh.method)
    fresh.state = jax.device_put(start, jax.tree.map(lambda leaf: leaf.sharding, trainer.state))
    fresh.collect = replace(
        trainer.collect,
        method=fresh.method,
        prompt_function=lambda: fresh.prompt_function(),
        compute_rewards=lambda batches, is_async: fresh.compute_rewards(batches, is_async),
        skip_errors=fresh.config.train.reward_errors == "skip",
    )
    return fresh
