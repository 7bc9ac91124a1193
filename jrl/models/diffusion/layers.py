# SPDX-License-Identifier: Apache-2.0
"""Layers of image networks: convolutions, group norm, the embedding of a timestep, upsampling.

Channels are last. Parameters are float32; a layer's `dtype` is that of its computation.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Num

from jrl.mesh import whole_over_fsdp
from jrl.models.layers import Projection, as_row

LONGEST_PERIOD = 10000.0


def fan_in_range(*inputs: int) -> float:
    """Standard deviation of a fresh kernel with so many inputs, torch's choice for linear maps and convolutions."""
    return 1.0 / math.sqrt(3 * math.prod(inputs))


class Conv(nn.Module):
    """A two-dimensional convolution with a bias; `kernel` is (height, width, inputs, outputs).

    Attributes:
      width: Channels made.
      kernel_size: Height and width of the window, 3 or 1.
      dtype: Of the computation.
      stride: Steps of the window.
      padding: Rows above and below, columns left and right; None: half a window on all sides.
    """

    width: int
    kernel_size: int
    dtype: Any
    stride: int = 1
    padding: tuple[tuple[int, int], tuple[int, int]] | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "B Y X C"]) -> Float[Array, "B Y2 X2 D"]:
        """(B, Y, X, C) to (B, Y / stride, X / stride, width), rounded up under the padding of None."""
        size = self.kernel_size
        inputs = (size, size, x.shape[-1])
        init = nn.initializers.normal(fan_in_range(*inputs))
        kernel = self.param("kernel", init, (*inputs, self.width), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros_init(), (self.width,), jnp.float32)
        y = self._product(x, kernel)
        return y + as_row(bias.astype(self.dtype), y.ndim)

    def _product(
        self, x: Float[Array, "B Y X C"], kernel: Float[Array, "H W C D"]
    ) -> Float[Array, "B Y2 X2 D"]:
        half = self.kernel_size // 2
        # Where a kernel has more elements than what it is applied to, as on the coarsest levels, the compiler would
        # gather the rows of all devices in its place, and every device would compute them all. A sampling call has made
        # it whole before its loop over steps. In an update it is gathered once for a pass and its gradient, and whole
        # in between: to gather it for each would send twice as much.
        path = "/".join((*self.path, "kernel"))
        kernel = whole_over_fsdp({path: kernel})[path]
        return jax.lax.conv_general_dilated(
            x.astype(self.dtype),
            kernel.astype(self.dtype),
            window_strides=(self.stride, self.stride),
            padding=((half, half), (half, half)) if self.padding is None else self.padding,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )


class GroupNorm(nn.Module):
    """Normalises groups of channels over all places of an image (Wu and He 2018, arXiv:1803.08494).

    In float32, and so is the result: what follows (an activation, then a layer with a dtype of its own) rounds it once.
    The variance is that of the centred values: E[x²] − E[x]² loses all its digits where the mean is large.

    Attributes:
      num_groups: Divides the number of channels.
      epsilon: Added to the variance.
    """

    num_groups: int
    epsilon: float

    @nn.compact
    def __call__(self, x: Float[Array, "B Y X C"]) -> Float[Array, "B Y X C"]:
        """Normalises, then applies scale and bias of each channel."""
        width = x.shape[-1]
        grouped = x.astype(jnp.float32).reshape(*x.shape[:-1], self.num_groups, width // self.num_groups)
        grouped = grouped - grouped.mean(axis=(1, 2, 4), keepdims=True)
        variance = jnp.square(grouped).mean(axis=(1, 2, 4), keepdims=True)
        y = (grouped * jax.lax.rsqrt(variance + self.epsilon)).reshape(x.shape)
        scale = self.param("scale", nn.initializers.ones_init(), (width,), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros_init(), (width,), jnp.float32)
        return y * as_row(scale.astype(jnp.float32), y.ndim) + as_row(bias.astype(jnp.float32), y.ndim)


def linear(size_in: int, size_out: int, dtype: Any, *, use_bias: bool = True, name: str) -> Projection:
    """A linear map of the last axis."""
    return Projection((size_in,), (size_out,), use_bias, fan_in_range(size_in), dtype, name=name)


def sinusoids(
    timesteps: Num[Array, "B"], width: int, *, cosine_first: bool, freq_shift: float
) -> Float[Array, "B D"]:
    """Sines and cosines of a timestep at `width` / 2 frequencies, float32 whatever the network's dtype is.

        ω_k = 10000^(−k / (width / 2 − freq_shift)),  k = 0 ... width / 2 − 1

    Args:
      timesteps: Of the noise schedule; bfloat16 could not tell 998 from 1000, so they are multiplied in float32.
      width: Even.
      cosine_first: Cosines fill the first half rather than the second.
      freq_shift: Taken from the number of frequencies in the exponent.
    Reference: Vaswani et al. 2017, arXiv:1706.03762, section 3.5.
    """
    half = width // 2
    # On the host in float64: a device's own exponential would make the last bit of an angle near 1000 its affair.
    frequencies = np.exp(np.arange(half) * (-math.log(LONGEST_PERIOD) / (half - freq_shift)))
    angles = timesteps.astype(jnp.float32)[:, None] * jnp.asarray(frequencies, jnp.float32)[None]
    sines, cosines = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([cosines, sines] if cosine_first else [sines, cosines], axis=-1)


class TimestepEmbedding(nn.Module):
    """Two linear maps with SiLU between them, from the sinusoids of a timestep to what the residual blocks read.

    Attributes:
      width: Of the result.
      dtype: Of the computation.
    """

    width: int
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "B D"]) -> Float[Array, "B E"]:
        """(B, D) sinusoids to (B, width)."""
        x = linear(x.shape[-1], self.width, self.dtype, name="linear_1")(x)
        return linear(self.width, self.width, self.dtype, name="linear_2")(nn.silu(x))


def upsample_nearest(
    x: Float[Array, "B Y X C"], size: tuple[int, int] | None = None
) -> Float[Array, "B Y2 X2 C"]:
    """Every value four times, as a square of two by two.

    Args:
      x: The image.
      size: Height and width wanted, each twice the given one or one less, as after a downsampling that rounded up;
        None: twice.
    """
    height, width = size or (2 * x.shape[1], 2 * x.shape[2])
    return jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)[:, :height, :width]
