# SPDX-License-Identifier: Apache-2.0
"""The multimodal diffusion transformer that denoises latents under a prompt (Esser et al. 2024, arXiv:2403.03206).

Stable Diffusion 3 and 3.5 are configs of it. Patches of the image and tokens of the prompt are two streams with weights
of their own, which attend together; the timestep and the pooled prompt shift, scale and gate every layer. Left out:
adapters of images, residuals of ControlNet, and layers that are skipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Num

from jrl.mesh import constrain_rows
from jrl.models.adapters.config import LoraConfig
from jrl.models.adapters.lora import Lora
from jrl.models.diffusion.denoiser import bind_denoiser_lora, check_latents, run_denoiser
from jrl.models.diffusion.joined_context import check_context
from jrl.models.diffusion.joint_block import LORA_TARGETS, JointBlock
from jrl.models.diffusion.layers import LONGEST_PERIOD, Conv, linear
from jrl.models.diffusion.mmdit_config import CLASS_NAME, MMDiTConfig, stored_mmdit_config
from jrl.models.diffusion.mmdit_entries import mmdit_entries
from jrl.models.diffusion.modulation import Modulation, TimeTextEmbedding, modulated
from jrl.models.entries_io import initial_shapes
from jrl.models.families.base import Entry
from jrl.typing import Params, PRNGKey


def positions(config: MMDiTConfig) -> Float[Array, "1 M D"]:
    """Sines and cosines of the column and then of the row of every patch of the largest image, as a fresh model has."""
    edge, quarter = config.pos_embed_max_size, config.width // 4
    places = jnp.arange(edge, dtype=jnp.float32) / (edge / (config.sample_size // config.patch_size))
    angles = places[:, None] * LONGEST_PERIOD ** (-jnp.arange(quarter, dtype=jnp.float32) / quarter)[None]
    waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    columns = jnp.broadcast_to(waves[None], (edge, edge, 2 * quarter))
    rows = jnp.broadcast_to(waves[:, None], (edge, edge, 2 * quarter))
    return jnp.concatenate([columns, rows], axis=-1).reshape(1, edge * edge, config.width)


class PatchEmbedding(nn.Module):
    """Patches as tokens, with their positions added.

    Attributes:
      config: The whole network's.
      dtype: Of the computation.
    """

    config: MMDiTConfig
    dtype: Any

    @nn.compact
    def __call__(self, latents: Float[Array, "B Y X C"]) -> Float[Array, "B P D"]:
        """(B, Y, X, C) to (B, patches, width), row by row."""
        config, size = self.config, self.config.patch_size
        edge = config.pos_embed_max_size
        patches = Conv(config.width, size, self.dtype, stride=size, padding=((0, 0), (0, 0)), name="proj")(
            latents
        )
        batch, height, width, channels = patches.shape
        table = self.param("position_bias", lambda key: positions(config))
        # It is a part of the checkpoint, but was never learned.
        square = jax.lax.stop_gradient(table).astype(self.dtype).reshape(1, edge, edge, channels)
        top, left = (edge - height) // 2, (edge - width) // 2
        crop = square[:, top : top + height, left : left + width]
        return (patches + jnp.broadcast_to(crop, patches.shape)).reshape(batch, height * width, channels)


class MMDiTModule(nn.Module):
    """The network; `MMDiT` is how it is called.

    Attributes:
      config: The architecture.
      dtype: Of the computation; norms, softmax, sinusoids and the last linear map are float32 always.
      remat: Keeps the input of each block, and computes the rest anew in the backward pass.
    """

    config: MMDiTConfig
    dtype: Any = jnp.float32
    remat: bool = False

    @nn.compact
    def __call__(
        self, latents: Float[Array, "B Y X C"], timesteps: Num[Array, "B"], context: Float[Array, "B Q D"]
    ) -> Float[Array, "B Y X C2"]:
        """The raw output, float32."""
        config, size = self.config, self.config.patch_size
        make = nn.remat(JointBlock) if self.remat else JointBlock
        prompt, pooled = jnp.split(context, [context.shape[1] - 1], axis=1)
        pooled = pooled[:, 0, : config.pooled_projection_dim]
        time = TimeTextEmbedding(config.width, self.dtype, name="time_text_embed")(timesteps, pooled)
        embedder = linear(config.joint_attention_dim, config.width, self.dtype, name="context_embedder")
        tokens = constrain_rows(embedder(prompt))
        x = constrain_rows(PatchEmbedding(config, self.dtype, name="pos_embed")(latents))
        for index in range(config.num_layers):
            block = make(
                config.heads,
                self.dtype,
                is_dual=index in config.dual_attention_layers,
                is_last=index == config.num_layers - 1,
                name=f"transformer_blocks_{index}",
            )
            x, tokens = block(x, tokens, time)
        scale, shift = Modulation(2, self.dtype, name="norm_out")(time)
        made = config.channels_made
        # In float32: guidance multiplies what is rounded here by its scale.
        x = linear(config.width, size**2 * made, jnp.float32, name="proj_out")(modulated(x, shift, scale))
        batch, height, width, _ = latents.shape
        squares = x.reshape(batch, height // size, width // size, size, size, made)
        return squares.swapaxes(2, 3).reshape(batch, height, width, made)


@dataclass(frozen=True)
class MMDiT:
    """A multimodal diffusion transformer without weights.

    Attributes:
      config: The architecture.
    """

    config: MMDiTConfig

    @property
    def folder_name(self) -> str:
        """Name of the folder in a pipeline."""
        return "transformer"

    @property
    def patch_size(self) -> int:
        """Latents along the edge of a patch."""
        return self.config.patch_size

    @cached_property
    def shapes(self) -> dict[str, Any]:
        """Shapes of the parameters, nested as they are."""
        return dict(initial_shapes(self.init))

    def init(self, key: PRNGKey) -> dict[str, Any]:
        """Fresh float32 parameters, as large as torch's are: no layer starts at 0 but biases."""
        config = self.config
        latents = jnp.zeros((1, config.patch_size, config.patch_size, config.in_channels))
        context = jnp.zeros((1, 2, config.joint_attention_dim))
        init = jax.jit(MMDiTModule(config).init)
        return dict(init(key, latents, jnp.zeros(1), context)["params"])

    def apply(
        self,
        params: Params,
        lora: Params | None,
        latents: Float[Array, "B Y X C"],
        timesteps: Num[Array, "*B"],
        context: Float[Array, "B Q D"],
        *,
        dtype: Any,
        remat: bool,
    ) -> Float[Array, "B Y X C2"]:
        """The raw output, float32: a velocity, as the model was trained.

        Args:
          params: Weights; they are cast to `dtype` where they are used.
          lora: The collection that `Lora.variables` gives; None: the base model.
          latents: Noisy latents.
          timesteps: σ times the timesteps of training: one for each row, or one for all.
          context: Of the prompts, from `join_context`.
          dtype: Of the computation.
          remat: Keeps the input of each block only, and computes the rest anew in the backward pass.
        Raises:
          ValueError: If latents or context have another width than the network reads, or the image is too large.
        """
        config = self.config
        check_latents(latents, config.in_channels)
        largest = config.pos_embed_max_size * config.patch_size
        if any(edge % config.patch_size or edge > largest for edge in latents.shape[1:3]):
            raise ValueError(
                f"height and width of `latents` must be multiples of {config.patch_size}, at most {largest}, got "
                f"{latents.shape[1:3]}."
            )
        check_context(context, config.joint_attention_dim)
        return run_denoiser(MMDiTModule(config, dtype, remat), params, lora, latents, timesteps, context)

    def bind_lora(self, config: LoraConfig) -> Lora:
        """The adapter that a configuration makes of this network; by default of its joint attention (`LORA_TARGETS`).

        Raises:
          ValueError: If it matches nothing, or the embedding of patches: only linear maps are adapted.
        """
        return bind_denoiser_lora(config, self.shapes, self.entries(), CLASS_NAME, targets=LORA_TARGETS)

    def entries(self) -> list[Entry]:
        """Every tensor of its file."""
        return mmdit_entries(self.config)

    def stored_config(self) -> dict[str, Any]:
        """Contents of config.json, as diffusers reads it."""
        return stored_mmdit_config(self.config)
