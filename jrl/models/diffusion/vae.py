# SPDX-License-Identifier: Apache-2.0
"""The autoencoder between images and latents (Rombach et al. 2022, arXiv:2112.10752, section 3.1).

Residual blocks on a few levels, half as large each, with one attention over all places at the coarsest. It knows no
timestep. Channels are last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jrl.mesh import constrain_rows
from jrl.models.diffusion.layers import Conv, GroupNorm, linear
from jrl.models.diffusion.resnet import ResnetBlock, Upsample
from jrl.models.diffusion.transformer import attend
from jrl.models.diffusion.vae_config import VAEConfig, stored_vae_config
from jrl.models.diffusion.vae_entries import vae_entries
from jrl.models.families.base import Entry
from jrl.typing import Params, PRNGKey

EPSILON = 1e-6
"""Of every norm of it."""
SMALLEST, LARGEST = -30.0, 20.0
"""Bounds of the encoder's log-variances."""


class LatentMoments(NamedTuple):
    """The Gaussian of an image's latents, in the units that the denoiser reads.

    Attributes:
      mean: Of each latent.
      deviation: Its standard deviation.
    """

    mean: Float[Array, "B Y X C"]
    deviation: Float[Array, "B Y X C"]


class PlaceAttention(nn.Module):
    """Attention of one head over all places of an image, beside the identity.

    Attributes:
      num_groups: Of the norm.
      dtype: Of the projections; scores and softmax are float32.
    """

    num_groups: int
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "B Y X C"]) -> Float[Array, "B Y X C"]:
        """The image, and what each place reads of all others."""
        width = x.shape[-1]
        h = GroupNorm(self.num_groups, EPSILON, name="group_norm")(x)
        h = h.reshape(x.shape[0], -1, 1, width)
        q, k, v = (linear(width, width, self.dtype, name=name)(h) for name in ("to_q", "to_k", "to_v"))
        h = linear(width, width, self.dtype, name="to_out_0")(attend(q, k, v))
        return constrain_rows(x.astype(self.dtype) + h.reshape(x.shape))


class Middle(nn.Module):
    """The coarsest level: a residual block, attention, a residual block.

    Attributes:
      config: The whole network's.
      dtype: Of the computation.
    """

    config: VAEConfig
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "B Y X C"]) -> Float[Array, "B Y X C"]:
        """(B, Y, X, C) to the same shape."""
        groups = self.config.norm_num_groups
        x = _resnet(self.config, x.shape[-1], self.dtype, 0)(x)
        if self.config.mid_block_add_attention:
            x = PlaceAttention(groups, self.dtype, name="attentions_0")(x)
        return _resnet(self.config, x.shape[-1], self.dtype, 1)(x)


class Shrink(nn.Module):
    """A convolution of stride 2 that reads one row more below and one column more on the right.

    Attributes:
      dtype: Of the computation.
    """

    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "B Y X C"]) -> Float[Array, "B Y2 X2 C"]:
        """Half the height and width."""
        padding = ((0, 1), (0, 1))
        return constrain_rows(Conv(x.shape[-1], 3, self.dtype, stride=2, padding=padding, name="conv")(x))


class Level(nn.Module):
    """The residual blocks of one size, and the way to the next.

    Attributes:
      config: The whole network's.
      blocks: Channels that each block reads and makes.
      resampler: `Shrink` or `Upsample`; None at the last level.
      dtype: Of the computation.
    """

    config: VAEConfig
    blocks: tuple[tuple[int, int], ...]
    resampler: type[Shrink] | type[Upsample] | None
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "B Y X C"]) -> Float[Array, "B Y2 X2 D"]:
        """The image in the size of the next level."""
        for index, (_, width) in enumerate(self.blocks):
            x = _resnet(self.config, width, self.dtype, index)(x)
        if self.resampler is None:
            return x
        name = "downsamplers_0" if self.resampler is Shrink else "upsamplers_0"
        return self.resampler(self.dtype, name=name)(x)


class Encoder(nn.Module):
    """Encoder from images to the parameters of their code.

    Attributes:
      config: The architecture.
      dtype: Of the computation.
    """

    config: VAEConfig
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "B Z W 3"]) -> Float[Array, "B Y X C"]:
        """Means in the first half of the channels, log-variances in the second."""
        config, levels = self.config, self.config.down_levels()
        x = Conv(config.block_out_channels[0], 3, self.dtype, name="conv_in")(x)
        for index, blocks in enumerate(levels):
            resampler = Shrink if index < len(levels) - 1 else None
            x = Level(config, blocks, resampler, self.dtype, name=f"down_blocks_{index}")(x)
        x = Middle(config, self.dtype, name="mid_block")(x)
        x = nn.silu(GroupNorm(config.norm_num_groups, EPSILON, name="conv_norm_out")(x))
        return Conv(2 * config.latent_channels, 3, self.dtype, name="conv_out")(x)


class Decoder(nn.Module):
    """Decoder from the code to images.

    Attributes:
      config: The architecture.
      dtype: Of the computation.
    """

    config: VAEConfig
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "B Y X C"]) -> Float[Array, "B Z W 3"]:
        """Images, roughly in [−1, 1]."""
        config, levels = self.config, self.config.up_levels()
        x = Conv(config.block_out_channels[-1], 3, self.dtype, name="conv_in")(x)
        x = Middle(config, self.dtype, name="mid_block")(x)
        for index, blocks in enumerate(levels):
            resampler = Upsample if index < len(levels) - 1 else None
            x = Level(config, blocks, resampler, self.dtype, name=f"up_blocks_{index}")(x)
        x = nn.silu(GroupNorm(config.norm_num_groups, EPSILON, name="conv_norm_out")(x))
        return Conv(config.out_channels, 3, self.dtype, name="conv_out")(x)


class VAEModule(nn.Module):
    """Both halves, and the 1 × 1 convolutions between them; `VAE` is how it is called.

    Attributes:
      config: The architecture.
      dtype: Of the computation; norms and softmax are float32 always.
    """

    config: VAEConfig
    dtype: Any = jnp.float32

    def setup(self) -> None:
        """Names the parts."""
        config = self.config
        self.encoder, self.decoder = Encoder(config, self.dtype), Decoder(config, self.dtype)
        if config.use_quant_conv:
            self.quant_conv = Conv(2 * config.latent_channels, 1, self.dtype)
        if config.use_post_quant_conv:
            self.post_quant_conv = Conv(config.latent_channels, 1, self.dtype)

    def encode(self, images: Float[Array, "B Z W 3"]) -> Float[Array, "B Y X C"]:
        """The parameters of the code, of images in [−1, 1]."""
        x = self.encoder(images)
        return self.quant_conv(x) if self.config.use_quant_conv else x

    def decode(self, code: Float[Array, "B Y X C"]) -> Float[Array, "B Z W 3"]:
        """Images, roughly in [−1, 1]."""
        return self.decoder(self.post_quant_conv(code) if self.config.use_post_quant_conv else code)

    def both(self, images: Float[Array, "B Z W 3"]) -> Float[Array, "B Z W 3"]:
        """There and back, for `init`."""
        return self.decode(self.encode(images)[..., : self.config.latent_channels])


@dataclass(frozen=True)
class VAE:
    """An autoencoder without weights.

    Attributes:
      config: The architecture.
    """

    config: VAEConfig

    @property
    def factor(self) -> int:
        """Pixels along the edge of one latent."""
        return self.config.factor

    @property
    def channels(self) -> int:
        """C of the latents."""
        return self.config.latent_channels

    def init(self, key: PRNGKey) -> dict[str, Any]:
        """Fresh float32 parameters."""
        images = jnp.zeros((1, self.factor, self.factor, self.config.in_channels))
        init = jax.jit(VAEModule(self.config).init, static_argnames="method")
        return dict(init(key, images, method=VAEModule.both)["params"])

    def decode(
        self, params: Params, latents: Float[Array, "B Y X C"], *, dtype: Any
    ) -> Float[Array, "B Z W 3"]:
        """Images of the denoiser's latents, float32, clipped to [0, 1].

        Args:
          params: Weights; they are cast to `dtype` where they are used.
          latents: What the sampler ends with.
          dtype: Of the computation; float16 overflows in the decoder of Stable Diffusion.
        """
        code = latents / self.config.scaling_factor + self.config.shift
        images: Any = VAEModule(self.config, dtype).apply({"params": params}, code, method=VAEModule.decode)
        return jnp.clip(images.astype(jnp.float32) / 2 + 0.5, 0.0, 1.0)

    def encode(self, params: Params, images: Float[Array, "B Z W 3"], *, dtype: Any) -> LatentMoments:
        """The denoiser's latents of images: `decode` gives them back, up to what the code has no room for.

        Args:
          params: Weights.
          images: In [0, 1]; height and width are multiples of `factor`.
          dtype: Of the computation.
        """
        module = VAEModule(self.config, dtype)
        code: Any = module.apply({"params": params}, 2 * images - 1, method=VAEModule.encode)
        mean, log_variance = jnp.split(code.astype(jnp.float32), 2, axis=-1)
        deviation = jnp.exp(jnp.clip(log_variance, SMALLEST, LARGEST) / 2)
        scale = self.config.scaling_factor
        return LatentMoments(scale * (mean - self.config.shift), scale * deviation)

    def entries(self) -> list[Entry]:
        """Every tensor of its file."""
        return vae_entries(self.config)

    def stored_config(self) -> dict[str, Any]:
        """Contents of config.json, as diffusers reads it."""
        return stored_vae_config(self.config)


def _resnet(config: VAEConfig, width: int, dtype: Any, index: int) -> ResnetBlock:
    return ResnetBlock(width, config.norm_num_groups, EPSILON, dtype, name=f"resnets_{index}")
