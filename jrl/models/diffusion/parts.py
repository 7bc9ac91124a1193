# SPDX-License-Identifier: Apache-2.0
"""Interfaces of a diffusion model's parts: a denoiser, an image decoder, a text encoder, and a tokenizer."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import Array, Float, Int, Num

from jrl.models.adapters.config import LoraConfig
from jrl.models.adapters.lora import Lora
from jrl.models.families.base import Entry
from jrl.typing import Params, PRNGKey

PromptTokenizer = Callable[[Sequence[str]], Int[np.ndarray, "B Q"]]
"""Texts to rows of ids, int32, all of the same length."""


class Denoiser(Protocol):
    """The network that is trained: what it predicts of noisy latents."""

    @property
    def config(self) -> Any:
        """Architecture."""

    @property
    def folder_name(self) -> str:
        """Name of its folder in a diffusers pipeline, "unet" or "transformer"."""

    @property
    def patch_size(self) -> int:
        """Latents along the edge of what it takes as one place."""

    def init(self, key: PRNGKey) -> Params:
        """Fresh weights, float32."""

    def apply(
        self,
        params: Params,
        lora: Params | None,
        latents: Float[Array, "B Y X C"],
        timesteps: Num[Array, "B"],
        context: Float[Array, "B Q D"],
        *,
        dtype: Any,
        remat: bool,
    ) -> Float[Array, "B Y X C"]:
        """The raw output, float32.

        Args:
          params: Weights.
          lora: The collection that `Lora.variables` gives; None: the base model.
          latents: Noisy latents.
          timesteps: One of the schedule's for each row.
          context: What the text encoder made of the prompts.
          dtype: Of the computation.
          remat: Keeps the input of each block only, and computes the rest anew for the gradient.
        """

    def bind_lora(self, config: LoraConfig) -> Lora:
        """The adapter that a configuration makes of it; ValueError where it matches nothing."""

    def entries(self) -> list[Entry]:
        """Every tensor of its file, and the parameter it holds."""

    def stored_config(self) -> dict[str, Any]:
        """Contents of config.json, as diffusers reads it."""


class TakesGuidance(abc.ABC):
    """Base of denoisers that were distilled under guidance: they are told its scale, and need no second pass."""

    @abc.abstractmethod
    def at_guidance(self, scale: float) -> Denoiser:
        """The network as it is told this scale; ValueError where it cannot be."""


class ImageDecoder(Protocol):
    """Decoder from latents to images."""

    @property
    def factor(self) -> int:
        """Pixels along the edge of one latent."""

    @property
    def channels(self) -> int:
        """C of the latents."""

    def decode(
        self, params: Params, latents: Float[Array, "B Y X C"], *, dtype: Any
    ) -> Float[Array, "B Z W 3"]:
        """Images of the latents that the sampler ends with, float32 in [0, 1]."""


class TextEncoder(Protocol):
    """Encoder from the ids of a prompt to the context that the denoiser reads."""

    def encode(self, params: Params, tokens: Int[Array, "B Q"], *, dtype: Any) -> Float[Array, "B Q D"]:
        """Encodes prompts to one vector for each position, in `dtype`."""
