# SPDX-License-Identifier: Apache-2.0
"""A gated convolution over few tokens, as in LFM2: out(after(h) · convolution(before(h) · x(h)))."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jrl.models.attention import AttentionContext, residual_init_range
from jrl.models.cache import StateCache, constrain_channels
from jrl.models.config import ShortConvolution, TransformerConfig
from jrl.models.layers import Projection
from jrl.models.mixers.convolution import convolve


class ShortConvolutionMixer(nn.Module):
    """The convolution in place of attention; it goes on from a cache.

    Attributes:
      config: The decoder.
      sizes: Of the convolution.
      dtype: Of the projections; the convolution adds up in float32.
    """

    config: TransformerConfig
    sizes: ShortConvolution
    dtype: Any

    def setup(self) -> None:
        """Names the projections and the taps."""
        config, sizes, width = self.config, self.sizes, self.config.width

        def project(init_range: float) -> Projection:
            return Projection((width,), (width,), False, init_range, self.dtype)

        self.before, self.after, self.x = (project(config.init_range) for _ in range(3))
        self.out = project(residual_init_range(config))
        taps = nn.initializers.normal(config.init_range)
        self.taps = self.param("taps", taps, (width, sizes.taps), jnp.float32)

    def __call__(
        self, x: Float[Array, "B Q D"], context: AttentionContext, cache: StateCache | None
    ) -> tuple[Float[Array, "B Q D"], StateCache | None]:
        """Answers for every token, to be added to the residual stream, and the cache's entry after them."""
        rows = context.recurrent
        assert rows is not None
        x = rows.take(x)
        gated = constrain_channels(self.before(x) * self.x(x))
        sums, tail = convolve(gated, self.taps, rows, None if cache is None else cache.tails[0])
        y = self.out(self.after(x) * sums.astype(self.dtype))
        return rows.put_back(y), None if cache is None else StateCache((constrain_channels(tail),))


def empty_convolution(
    config: TransformerConfig, sizes: ShortConvolution, batch_size: int, dtype: Any
) -> StateCache:
    """The entry before the first token."""
    return StateCache((constrain_channels(jnp.zeros((batch_size, sizes.taps - 1, config.width), dtype)),))
