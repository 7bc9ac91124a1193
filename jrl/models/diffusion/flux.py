# SPDX-License-Identifier: Apache-2.0
"""The transformer of FLUX.1, which denoises packed latents under a prompt (Black Forest Labs 2024, no paper).

Blocks over two streams as in Stable Diffusion 3, then blocks over both as one, whose attention and feed-forward layer
stand beside each other. Queries and keys are turned by the row and column of their patch. FLUX.1-dev is told the
guidance scale that it was distilled under; schnell knows of none. Left out: adapters of images and residuals of
ControlNet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Num

from jrl.mesh import constrain, constrain_rows
from jrl.models.adapters.config import LoraConfig
from jrl.models.adapters.lora import Lora
from jrl.models.diffusion.denoiser import bind_denoiser_lora, check_latents, run_denoiser
from jrl.models.diffusion.flux_config import CLASS_NAME, PACKED_EDGE, FluxConfig, stored_flux_config
from jrl.models.diffusion.flux_entries import flux_entries
from jrl.models.diffusion.joined_context import check_context
from jrl.models.diffusion.joint_block import LORA_TARGETS, Heads, JointBlock, attend_rotated, split_heads
from jrl.models.diffusion.layers import LONGEST_PERIOD, linear
from jrl.models.diffusion.modulation import Modulation, TimeTextEmbedding, modulated
from jrl.models.diffusion.parts import TakesGuidance
from jrl.models.entries_io import initial_shapes
from jrl.models.families.base import Entry
from jrl.models.positions import Rotation
from jrl.typing import Params, PRNGKey


def pack(latents: Float[Array, "B Y X C"]) -> Float[Array, "B P D"]:
    """Two by two latents as one patch, row by row; in a patch all rows and columns of a channel stand together."""
    batch, height, width, channels = latents.shape
    split = latents.reshape(
        batch, height // PACKED_EDGE, PACKED_EDGE, width // PACKED_EDGE, PACKED_EDGE, channels
    )
    return split.transpose(0, 1, 3, 5, 2, 4).reshape(batch, -1, PACKED_EDGE**2 * channels)


def unpack(patches: Float[Array, "B P D"], height: int, width: int) -> Float[Array, "B Y X C"]:
    """Latents of so many rows and columns: the reverse of `pack`."""
    shape = (patches.shape[0], height // PACKED_EDGE, width // PACKED_EDGE, -1, PACKED_EDGE, PACKED_EDGE)
    return patches.reshape(shape).transpose(0, 1, 4, 2, 5, 3).reshape(patches.shape[0], height, width, -1)


def patch_rotation(config: FluxConfig, rows: int, columns: int, num_tokens: int) -> Rotation:
    """Angles of every patch, row by row, and of a prompt's tokens behind them, which stand at 0 on all three axes.

        θ = position · 10000^(−2k / d)   on each axis of d dimensions

    They are computed on the host in float64, as diffusers does.

    Args:
      config: The architecture.
      rows: Of patches.
      columns: Of patches.
      num_tokens: Of the prompt.
    """
    places = np.zeros((rows * columns + num_tokens, len(config.axes_dims_rope)))
    places[: rows * columns, 1:] = np.stack(np.divmod(np.arange(rows * columns), columns), axis=1)
    angles = np.concatenate(
        [
            places[:, axis, None] * LONGEST_PERIOD ** (-np.arange(0, dim, 2) / dim)
            for axis, dim in enumerate(config.axes_dims_rope)
        ],
        axis=1,
    )
    return Rotation(*(jnp.asarray(wave(angles)[None], jnp.float32) for wave in (np.cos, np.sin)))


class SingleAttention(nn.Module):
    """Attention of one stream to itself, without a linear map behind it.

    Attributes:
      heads: Of it.
      dtype: Of the projections.
    """

    heads: Heads
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "B P D"], rotation: Rotation) -> Float[Array, "B P D"]:
        """Attends; the heads of each token are side by side."""
        names = ("to_q", "to_k", "to_v"), ("norm_q", "norm_k")
        queries, keys, values = split_heads(x, self.heads, *names, self.dtype)
        y = attend_rotated(queries, keys, values, rotation)
        return y.reshape(x.shape)


class SingleBlock(nn.Module):
    """Attention and a feed-forward layer beside each other, over patches and tokens as one stream.

    Attributes:
      heads: Of the attention.
      dtype: Of the computation.
    """

    heads: Heads
    dtype: Any

    @nn.compact
    def __call__(
        self, x: Float[Array, "B P D"], time: Float[Array, "B D"], rotation: Rotation
    ) -> Float[Array, "B P D"]:
        """The stream behind the block."""
        width = self.heads.total
        shift, scale, gate = Modulation(3, self.dtype, name="norm")(time)
        normed = modulated(x, shift, scale)
        wide = linear(width, 4 * width, self.dtype, name="proj_mlp")(normed)
        wide = nn.gelu(constrain(wide, "batch", None, "mlp"), approximate=True)
        read = SingleAttention(self.heads, self.dtype, name="attn")(normed, rotation)
        both = jnp.concatenate([read, wide], axis=-1)
        return constrain_rows(x + gate * linear(5 * width, width, self.dtype, name="proj_out")(both))


class FluxModule(nn.Module):
    """The network; `Flux` is how it is called.

    Attributes:
      config: The architecture.
      guidance: The scale that it is told; None: it is told none.
      dtype: Of the computation; norms, softmax, sinusoids and the last linear map are float32 always.
      remat: Keeps the input of each block, and computes the rest anew in the backward pass.
    """

    config: FluxConfig
    guidance: float | None
    dtype: Any = jnp.float32
    remat: bool = False

    @nn.compact
    def __call__(
        self, latents: Float[Array, "B Y X C"], timesteps: Num[Array, "B"], context: Float[Array, "B Q D"]
    ) -> Float[Array, "B Y X C"]:
        """The raw output, float32."""
        config, (_, height, width, _) = self.config, latents.shape
        prompt, pooled = jnp.split(context, [context.shape[1] - 1], axis=1)
        pooled = pooled[:, 0, : config.pooled_projection_dim]
        embed_time = TimeTextEmbedding(config.width, self.dtype, name="time_text_embed")
        time = embed_time(timesteps, pooled, self.guidance)
        embed_context = linear(config.joint_attention_dim, config.width, self.dtype, name="context_embedder")
        tokens = constrain_rows(embed_context(prompt))
        embed = linear(config.in_channels, config.width, self.dtype, name="x_embedder")
        x = constrain_rows(embed(pack(latents)))
        num_patches = x.shape[1]
        rotation = patch_rotation(config, height // PACKED_EDGE, width // PACKED_EDGE, tokens.shape[1])
        double = nn.remat(JointBlock) if self.remat else JointBlock
        single = nn.remat(SingleBlock) if self.remat else SingleBlock
        for index in range(config.num_layers):
            joint = double(config.heads, self.dtype, name=f"transformer_blocks_{index}")
            x, tokens = joint(x, tokens, time, rotation)
        x = constrain_rows(jnp.concatenate([x, tokens], axis=1))
        for index in range(config.num_single_layers):
            block = single(config.heads, self.dtype, name=f"single_transformer_blocks_{index}")
            x = block(x, time, rotation)
        scale, shift = Modulation(2, self.dtype, name="norm_out")(time)
        # In float32: what is rounded here is multiplied by the length of a step and divided by its noise.
        made = linear(config.width, config.channels_made, jnp.float32, name="proj_out")
        return unpack(made(modulated(x[:, :num_patches], shift, scale)), height, width)


@dataclass(frozen=True)
class Flux(TakesGuidance):
    """The transformer of FLUX.1 without weights.

    Attributes:
      config: The architecture.
      guidance: The scale that it is told; None: not said yet, or it knows of none.
    """

    config: FluxConfig
    guidance: float | None = None

    @property
    def folder_name(self) -> str:
        """Name of the folder in a pipeline."""
        return "transformer"

    @property
    def patch_size(self) -> int:
        """Latents along the edge of a patch."""
        return PACKED_EDGE

    @cached_property
    def shapes(self) -> dict[str, Any]:
        """Shapes of the parameters, nested as they are."""
        return dict(initial_shapes(self.init))

    def at_guidance(self, scale: float) -> Flux:
        """The network as it is told this scale; itself where it knows of none.

        Args:
          scale: w; 3.5 is usual.
        Raises:
          ValueError: If it knows of none, and is to be guided.
        """
        if self.config.guidance_embeds:
            return replace(self, guidance=float(scale))
        if scale > 1:
            raise ValueError(
                f"`guidance_scale` must be at most 1, got {scale}: this transformer knows of no guidance "
                "(`guidance_embeds` is false, as in FLUX.1-schnell)."
            )
        return self

    def init(self, key: PRNGKey) -> dict[str, Any]:
        """Fresh float32 parameters, as large as torch's are: no layer starts at 0 but biases."""
        config = self.config
        latents = jnp.zeros((1, PACKED_EDGE, PACKED_EDGE, config.latent_channels))
        context = jnp.zeros((1, 2, config.joint_attention_dim))
        init = jax.jit(FluxModule(config, 1.0 if config.guidance_embeds else None).init)
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
    ) -> Float[Array, "B Y X C"]:
        """The raw output, float32: a velocity, as the model was trained.

        Args:
          params: Weights; they are cast to `dtype` where they are used.
          lora: The collection that `Lora.variables` gives; None: the base model.
          latents: Noisy latents, not packed.
          timesteps: σ times the timesteps of training: one for each row, or one for all.
          context: Of the prompts, from `join_context`.
          dtype: Of the computation.
          remat: Keeps the input of each block only, and computes the rest anew in the backward pass.
        Raises:
          ValueError: If latents or context have another width than the network reads, the latents do not pack, or
            nobody has said which guidance scale the network is told.
        """
        config = self.config
        check_latents(latents, config.latent_channels)
        if any(edge % PACKED_EDGE for edge in latents.shape[1:3]):
            raise ValueError(
                f"height and width of `latents` must be multiples of {PACKED_EDGE}, which are packed into one patch, "
                f"got {latents.shape[1:3]}."
            )
        check_context(context, config.joint_attention_dim)
        if config.guidance_embeds and self.guidance is None:
            raise ValueError(
                "`guidance` must be a number: the transformer is told the guidance scale, got None. Call `at_guidance` "
                "first."
            )
        module = FluxModule(config, self.guidance, dtype, remat)
        return run_denoiser(module, params, lora, latents, timesteps, context)

    def bind_lora(self, config: LoraConfig) -> Lora:
        """The adapter that a configuration makes of this network; by default of all its attention (`LORA_TARGETS`).

        Raises:
          ValueError: If it matches nothing.
        """
        return bind_denoiser_lora(config, self.shapes, self.entries(), CLASS_NAME, targets=LORA_TARGETS)

    def entries(self) -> list[Entry]:
        """Every tensor of its file."""
        return flux_entries(self.config)

    def stored_config(self) -> dict[str, Any]:
        """Contents of config.json, as diffusers reads it."""
        return stored_flux_config(self.config)
