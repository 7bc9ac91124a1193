# SPDX-License-Identifier: Apache-2.0
"""The residual block of diffusion networks, and what makes an image half or twice as large."""

from __future__ import annotations

from typing import Any

from flax import linen as nn
from jaxtyping import Array, Float

from jrl.mesh import constrain, constrain_rows
from jrl.models.diffusion.layers import Conv, GroupNorm, linear, upsample_nearest


class ResnetBlock(nn.Module):
    """Two convolutions, each after a norm and SiLU, with the timestep added between them, beside the identity.

    Attributes:
      width: Channels made; the identity goes through a 1 × 1 convolution where the input has others.
      num_groups: Of both norms.
      epsilon: Of both norms.
      dtype: Of the convolutions.
      output_scale: Divides the sum.
    """

    width: int
    num_groups: int
    epsilon: float
    dtype: Any
    output_scale: float = 1.0

    @nn.compact
    def __call__(
        self, x: Float[Array, "B Y X C"], time: Float[Array, "B E"] | None = None
    ) -> Float[Array, "B Y X D"]:
        """The block's output; `time` is the embedded timestep, None in a network that knows none."""
        h = Conv(self.width, 3, self.dtype, name="conv1")(nn.silu(self._norm("norm1")(x)))
        if time is not None:
            added = linear(time.shape[-1], self.width, self.dtype, name="time_emb_proj")(nn.silu(time))
            h = h + added[:, None, None, :]
        h = constrain(h, "batch", None, None, "mlp")
        h = Conv(self.width, 3, self.dtype, name="conv2")(nn.silu(self._norm("norm2")(h)))
        if x.shape[-1] != self.width:
            x = Conv(self.width, 1, self.dtype, name="conv_shortcut")(x)
        return constrain_rows((x.astype(self.dtype) + h) / self.output_scale)

    def _norm(self, name: str) -> GroupNorm:
        return GroupNorm(self.num_groups, self.epsilon, name=name)


class Downsample(nn.Module):
    """A convolution of stride 2: half the height and width, rounded up.

    Attributes:
      dtype: Of the computation.
    """

    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "B Y X C"]) -> Float[Array, "B Y2 X2 C"]:
        """Halves height and width; the channels stay."""
        return constrain_rows(Conv(x.shape[-1], 3, self.dtype, stride=2, name="conv")(x))


class Upsample(nn.Module):
    """Every value four times, then a convolution.

    Attributes:
      dtype: Of the computation.
    """

    dtype: Any

    @nn.compact
    def __call__(
        self, x: Float[Array, "B Y X C"], size: tuple[int, int] | None = None
    ) -> Float[Array, "B Y2 X2 C"]:
        """Enlarges to `size`, as `upsample_nearest` does."""
        x = Conv(x.shape[-1], 3, self.dtype, name="conv")(upsample_nearest(x, size))
        return constrain_rows(x)
