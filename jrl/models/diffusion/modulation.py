# SPDX-License-Identifier: Apache-2.0
"""Shifts, scales and gates of transformer layers, made of timestep and pooled prompt (Peebles and Xie 2023).

Reference: arXiv:2212.09748, adaLN-Zero.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Num

from jrl.models.diffusion.layers import TimestepEmbedding, linear, sinusoids

EPSILON = 1e-6
"""Of every norm of these transformers."""
TIME_CHANNELS = 256
"""Sines and cosines of a timestep."""
GUIDANCE_TIMESTEPS = 1000.0
"""A guidance scale of 1 is embedded as this timestep."""


class TimeTextEmbedding(nn.Module):
    """The timestep, the pooled prompt and, where the network is told of it, the guidance scale as one vector.

    Attributes:
      width: Of the result.
      dtype: Of the computation.
    """

    width: int
    dtype: Any

    @nn.compact
    def __call__(
        self, timesteps: Num[Array, "B"], pooled: Float[Array, "B P"], guidance: float | None = None
    ) -> Float[Array, "B D"]:
        """(B,) and (B, P) to (B, width)."""
        found = self._waves("timestep_embedder", timesteps)
        if guidance is not None:
            found += self._waves(
                "guidance_embedder", jnp.full(timesteps.shape, guidance * GUIDANCE_TIMESTEPS)
            )
        return found + TimestepEmbedding(self.width, self.dtype, name="text_embedder")(pooled)

    def _waves(self, name: str, numbers: Num[Array, "B"]) -> Float[Array, "B D"]:
        waves = sinusoids(numbers, TIME_CHANNELS, cosine_first=True, freq_shift=0)
        return TimestepEmbedding(self.width, self.dtype, name=name)(waves)


class Modulation(nn.Module):
    """Shifts, scales and gates of a layer, from the embedded timestep.

    Attributes:
      count: Vectors made.
      dtype: Of the linear map.
    """

    count: int
    dtype: Any

    @nn.compact
    def __call__(self, time: Float[Array, "B D"]) -> list[Float[Array, "B 1 D"]]:
        """(B, D) to `count` vectors of each row, (B, 1, D)."""
        width = time.shape[-1]
        found = linear(width, self.count * width, self.dtype, name="linear")(nn.silu(time))
        return jnp.split(found[:, None], self.count, axis=-1)


def modulated(
    x: Float[Array, "B P D"], shift: Float[Array, "B 1 D"], scale: Float[Array, "B 1 D"]
) -> Float[Array, "B P D"]:
    """LayerNorm without weights of its own, then (1 + scale)·x + shift; the norm is float32.

    Args:
      x: A residual stream.
      shift: Of each row.
      scale: Likewise.
    """
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(axis=-1, keepdims=True) + EPSILON)
    return wide.astype(x.dtype) * (1.0 + scale) + shift
