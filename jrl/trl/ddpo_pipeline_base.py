# SPDX-License-Identifier: Apache-2.0
"""What `DDPOTrainer` needs of a pipeline, and what pipelines give."""

from __future__ import annotations

import abc
import contextlib
import os
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jrl.models.diffusion.pipeline import DiffusionModel
from jrl.trl.ddpo_native import OwnedDDPO
from jrl.trl.ddpo_scheduler import DDIMScheduler

__all__ = ["DDPOPipelineOutput", "DDPOSchedulerOutput", "DDPOStableDiffusionPipeline"]


@dataclass
class DDPOPipelineOutput:
    """What a pipeline makes of prompts.

    Attributes:
      images: (B 3 H W) float32 in [0, 1], Pillow images where asked for, or the last latents.
      latents: T + 1 arrays (B C Y X), from the first noise to the clean latents.
      log_probs: T arrays (B,): mean log-density of an element of each step's result; 0 at η = 0.
    """

    images: Any
    latents: list[np.ndarray]
    log_probs: list[np.ndarray]


@dataclass
class DDPOSchedulerOutput:
    """What a step gives.

    Attributes:
      latents: After it, (B C Y X).
      log_probs: Of them, (B,).
    """

    latents: jax.Array
    log_probs: jax.Array


class DDPOStableDiffusionPipeline(abc.ABC):
    """What `DDPOTrainer` needs of a pipeline: a `DiffusionModel`, and whether an adapter of it trains.

    Attributes:
      model: Networks, schedule and tokenizer.
      use_lora: Whether an adapter trains, and the model itself is frozen.
    """

    model: DiffusionModel
    use_lora: bool

    @abc.abstractmethod
    def attach(self, trainer: OwnedDDPO) -> None:
        """From here on the pipeline samples and saves with this trainer's parameters."""

    @property
    @abc.abstractmethod
    def scheduler(self) -> DDIMScheduler:
        """DDIM."""

    @abc.abstractmethod
    def save_pretrained(self, output_dir: str | os.PathLike[str]) -> None:
        """Writes a folder that diffusers reads, with the parameters as they are now."""

    @property
    def unet(self) -> Any:
        """The denoiser, without weights."""
        return self.model.unet

    @property
    def vae(self) -> Any:
        """The image decoder, without weights."""
        return self.model.vae

    @property
    def text_encoder(self) -> Any:
        """The text encoder, without weights."""
        return self.model.text_encoder

    @property
    def tokenizer(self) -> Any:
        """Texts to ids."""
        return self.model.tokenizer

    @property
    def autocast(self) -> Any:
        """A context that does nothing: what computes in which type is part of the compiled program."""
        return contextlib.nullcontext

    def set_progress_bar_config(self, **kwargs: Any) -> None:
        """Takes what scripts set, and shows no bar: a compiled loop has nothing to show between two steps."""
        del kwargs
