# SPDX-License-Identifier: Apache-2.0
"""The U-Net that denoises latents under a prompt (Rombach et al. 2022, arXiv:2112.10752).

Stable Diffusion 1, 2 and XL are configs of it. Residual blocks and attention lead down through coarser and coarser
levels and back up, where each block also reads what the way down made at its size. XL adds the pooled prompt and the
sizes of the image to the timestep (Podell et al. 2023, arXiv:2307.01952). Left out: class labels, dropout.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Num

from jrl.mesh import constrain_rows
from jrl.models.adapters.config import LoraConfig
from jrl.models.adapters.lora import Lora
from jrl.models.config import LATER, Described
from jrl.models.diffusion.denoiser import bind_denoiser_lora, check_latents, run_denoiser
from jrl.models.diffusion.layers import Conv, GroupNorm, TimestepEmbedding, sinusoids
from jrl.models.diffusion.resnet import Downsample, ResnetBlock, Upsample
from jrl.models.diffusion.transformer import SpatialTransformer
from jrl.models.diffusion.unet_config import CLASS_NAME, Level, UNetConfig, stored_unet_config
from jrl.models.diffusion.unet_entries import unet_entries
from jrl.models.entries_io import initial_shapes
from jrl.models.families.base import Entry
from jrl.typing import Params, PRNGKey

LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
"""The projections of both attentions: what an adapter adapts where its configuration names nothing."""


class _Stage(nn.Module):
    """Base class of the stages down, in the middle and up: their blocks.

    Attributes:
      config: The whole network's.
      dtype: Of the computation.
      remat: Keeps the input of each block, and computes the rest anew in the backward pass.
    """

    config: UNetConfig
    dtype: Any
    remat: bool

    def _resnet(self, index: int, width: int, output_scale: float = 1.0) -> ResnetBlock:
        make = nn.remat(ResnetBlock) if self.remat else ResnetBlock
        config = self.config
        name = f"resnets_{index}"
        return make(width, config.norm_num_groups, config.norm_eps, self.dtype, output_scale, name=name)

    def _attention(self, index: int, num_heads: int, num_layers: int) -> SpatialTransformer:
        make = nn.remat(SpatialTransformer) if self.remat else SpatialTransformer
        return make(
            num_layers,
            num_heads,
            self.config.norm_num_groups,
            self.config.use_linear_projection,
            self.dtype,
            name=f"attentions_{index}",
        )


class DownStage(_Stage):
    """A level on the way down.

    Attributes:
      level: Its blocks.
    """

    level: Level

    @nn.compact
    def __call__(
        self, x: Float[Array, "B Y X C"], time: Float[Array, "B E"], context: Float[Array, "B Q D"]
    ) -> list[Float[Array, "B Y2 X2 D"]]:
        """Outputs of the level, which the way up reads back; the next level reads the last."""
        made = []
        for index, (_, width) in enumerate(self.level.resnets):
            x = self._resnet(index, width)(x, time)
            if self.level.num_heads is not None:
                x = self._attention(index, self.level.num_heads, self.level.num_layers)(x, context)
            made.append(x)
        return [*made, Downsample(self.dtype, name="downsamplers_0")(x)] if self.level.resamples else made


class MidStage(_Stage):
    """The blocks at the coarsest size."""

    @nn.compact
    def __call__(
        self, x: Float[Array, "B Y X C"], time: Float[Array, "B E"], context: Float[Array, "B Q D"]
    ) -> Float[Array, "B Y X C"]:
        """(B, Y, X, C) to the same shape."""
        scale, width = self.config.mid_block_scale_factor, x.shape[-1]
        x = self._resnet(0, width, scale)(x, time)
        x = self._attention(0, self.config.heads[-1], self.config.layers[-1])(x, context)
        return self._resnet(1, width, scale)(x, time)


class UpStage(_Stage):
    """A level on the way up.

    Attributes:
      level: Its blocks.
    """

    level: Level

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B Y X C"],
        skips: list[Float[Array, "B Y2 X2 D"]],
        time: Float[Array, "B E"],
        context: Float[Array, "B Q D"],
    ) -> Float[Array, "B Y2 X2 D"]:
        """Takes the skips it reads off the end of the list, and ends at the size of the next one there."""
        for index, (_, width) in enumerate(self.level.resnets):
            x = self._resnet(index, width)(jnp.concatenate([x, skips.pop()], axis=-1), time)
            if self.level.num_heads is not None:
                x = self._attention(index, self.level.num_heads, self.level.num_layers)(x, context)
        if self.level.resamples:
            # Where the way down rounded a size up, twice the size is one too many.
            _, height, width, _ = skips[-1].shape
            x = Upsample(self.dtype, name="upsamplers_0")(x, (height, width))
        return x


class UNetModule(nn.Module):
    """The network; `UNet` is how it is called.

    Attributes:
      config: The architecture.
      dtype: Of the computation; norms, softmax, sinusoids and the last convolution are float32 always.
      remat: Keeps the input of each block, and computes the rest anew in the backward pass.
      image_factor: See `UNet`.
    """

    config: UNetConfig
    dtype: Any = jnp.float32
    remat: bool = False
    image_factor: int = 8

    @nn.compact
    def __call__(
        self, latents: Float[Array, "B Y X C"], timesteps: Num[Array, "B"], context: Float[Array, "B Q D"]
    ) -> Float[Array, "B Y X C"]:
        """The raw output, float32."""
        config, options = self.config, (self.config, self.dtype, self.remat)
        waves = sinusoids(
            timesteps,
            config.block_out_channels[0],
            cosine_first=config.flip_sin_to_cos,
            freq_shift=config.freq_shift,
        )
        time = TimestepEmbedding(config.time_width, self.dtype, name="time_embedding")(waves)
        if config.addition_embed_type is not None:
            context, pooled = jnp.split(context, [context.shape[1] - 1], axis=1)
            pooled = pooled[:, 0, : config.pooled_width].astype(jnp.float32)
            added = jnp.concatenate([pooled, self._size_waves(latents.shape)], axis=-1)
            time = time + TimestepEmbedding(config.time_width, self.dtype, name="add_embedding")(added)
        x = 2.0 * latents - 1.0 if config.center_input_sample else latents
        x = constrain_rows(Conv(config.block_out_channels[0], 3, self.dtype, name="conv_in")(x))
        skips = [x]
        for index, level in enumerate(config.down_levels()):
            skips += DownStage(*options, level, name=f"down_blocks_{index}")(skips[-1], time, context)
        x = MidStage(*options, name="mid_block")(skips[-1], time, context)
        for index, level in enumerate(config.up_levels()):
            x = UpStage(*options, level, name=f"up_blocks_{index}")(x, skips, time, context)
        x = nn.silu(GroupNorm(config.norm_num_groups, config.norm_eps, name="conv_norm_out")(x))
        # In float32: guidance multiplies what is rounded here by its scale.
        return Conv(config.out_channels, 3, jnp.float32, name="conv_out")(x)

    def _size_waves(self, shape: tuple[int, ...]) -> Float[Array, "B W"]:
        """Sinusoids of original size, upper left corner and target size, in pixels: those of a whole image as it is."""
        config, (rows, height, width, _) = self.config, shape
        assert config.addition_time_embed_dim is not None  # by the checks of the config
        edges = (self.image_factor * height, self.image_factor * width)
        waves = sinusoids(
            jnp.array([*edges, 0, 0, *edges]),
            config.addition_time_embed_dim,
            cosine_first=config.flip_sin_to_cos,
            freq_shift=config.freq_shift,
        )
        return jnp.broadcast_to(waves.reshape(1, -1), (rows, waves.size))


@dataclass(frozen=True, repr=False)
class UNet(Described):
    """A U-Net without weights.

    Attributes:
      config: The architecture.
      image_factor: Pixels along the edge of one latent: with `addition_embed_type` it reads sizes in pixels.
    """

    config: UNetConfig
    image_factor: int = field(default=8, metadata=LATER)

    @property
    def folder_name(self) -> str:
        """Name of the folder in a pipeline."""
        return "unet"

    @property
    def patch_size(self) -> int:
        """Every latent is a place."""
        return 1

    @cached_property
    def shapes(self) -> dict[str, Any]:
        """Shapes of the parameters, nested as they are."""
        return dict(initial_shapes(self.init))

    def init(self, key: PRNGKey) -> dict[str, Any]:
        """Fresh float32 parameters, as large as torch's are: no layer starts at 0 but biases."""
        config = self.config
        # The least image that has all levels.
        edge = 2 ** (len(config.block_out_channels) - 1)
        latents = jnp.zeros((1, edge, edge, config.in_channels))
        context = jnp.zeros((1, 2, config.cross_attention_dim))
        # Jitted, nothing but the random numbers is computed.
        init = jax.jit(UNetModule(config).init)
        return dict(init(key, latents, jnp.zeros(1, jnp.int32), context)["params"])

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
        """The raw output, float32: noise, clean latents or a mixture of them, as the model was trained.

        Args:
          params: Weights; they are cast to `dtype` where they are used.
          lora: The collection that `Lora.variables` gives; None: the base model.
          latents: Noisy latents.
          timesteps: Of the noise schedule: one for each row, or one for all.
          context: What the text encoder made of the prompts; with `addition_embed_type`, from `join_context`.
          dtype: Of the computation.
          remat: Keeps the input of each block only, and computes the rest anew in the backward pass.
        Raises:
          ValueError: If the latents or the context have another width than the network reads.
        """
        config = self.config
        check_latents(latents, config.in_channels)
        if context.ndim != 3 or context.shape[-1] != config.cross_attention_dim:
            raise ValueError(
                f"`context` must have shape (rows, positions, {config.cross_attention_dim}), got {context.shape}. Does "
                "the text encoder belong to this network?"
            )
        if config.addition_embed_type is not None and context.shape[1] < 2:
            raise ValueError(
                f"`context` must have at least 2 rows, the last of them the pooled prompt as `join_context` makes it, "
                f"got {context.shape[1]}."
            )
        module = UNetModule(config, dtype, remat, self.image_factor)
        return run_denoiser(module, params, lora, latents, timesteps, context)

    def bind_lora(self, config: LoraConfig) -> Lora:
        """The adapter that a configuration makes of this network; by default of its attentions (`LORA_TARGETS`).

        Raises:
          ValueError: If it matches nothing, or a convolution: only linear maps are adapted.
        """
        return bind_denoiser_lora(config, self.shapes, self.entries(), CLASS_NAME, targets=LORA_TARGETS)

    def entries(self) -> list[Entry]:
        """Every tensor of its file."""
        return unet_entries(self.config)

    def stored_config(self) -> dict[str, Any]:
        """Contents of config.json, as diffusers reads it."""
        return stored_unet_config(self.config)
