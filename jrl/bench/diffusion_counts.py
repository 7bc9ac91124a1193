# SPDX-License-Identifier: Apache-2.0
"""Operations that DDPO's work on Stable Diffusion needs, by formula from the configuration of the U-Net.

Counted are matrix products and convolutions, a multiplication with its addition as two operations, and attention over
all pairs of positions. Norms, activations, softmax, the sampler's arithmetic and what is computed twice to save memory
are left out; so is what lies below the first adapted layer and needs no gradient, which is counted as if it did (the
first convolution and residual block: under a hundredth).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jrl.models.diffusion.unet_config import Level, UNetConfig

_KERNEL = 9
"""Weights of a 3 × 3 convolution for each pair of channels."""


@dataclass(frozen=True)
class UNetCounts:
    """Multiplications of a forward pass over one row.

    Attributes:
      weights: By weights: convolutions and linear maps.
      products: Of activations with each other: attention's scores and sums.
    """

    weights: int
    products: int

    @property
    def forward(self) -> int:
        """Operations of a forward pass."""
        return 2 * (self.weights + self.products)

    def backward(self, *, full: bool) -> int:
        """Operations of a backward pass.

        Args:
          full: Whether every weight trains. An adapter's own products are not counted: at rank 4 they are below a
            hundredth.
        """
        return 2 * ((2 if full else 1) * self.weights + 2 * self.products)


def unet_counts(config: UNetConfig, *, latent_shape: tuple[int, int], context_length: int) -> UNetCounts:
    """Counts one row of a U-Net.

    Args:
      config: Of the U-Net.
      latent_shape: (height, width) of the latents.
      context_length: Positions of a prompt's embedding, without a pooled one.
    """
    counter = _Counter(config, context_length)
    height, width = latent_shape
    sizes = [(height, width)]
    for _ in config.down_levels()[:-1]:
        height, width = -(-height // 2), -(-width // 2)
        sizes.append((height, width))
    counter.linear(config.block_out_channels[0], config.time_width, 1)
    counter.linear(config.time_width, config.time_width, 1)
    if config.projection_class_embeddings_input_dim is not None:
        counter.linear(config.projection_class_embeddings_input_dim, config.time_width, 1)
        counter.linear(config.time_width, config.time_width, 1)
    counter.convolution(config.in_channels, config.block_out_channels[0], sizes[0])
    for index, level in enumerate(config.down_levels()):
        counter.level(level, sizes[index])
        if level.resamples:
            counter.convolution(level.resnets[-1][1], level.resnets[-1][1], sizes[index + 1])
    middle = config.mid_level()
    counter.level(replace(middle, resnets=middle.resnets[:1]), sizes[-1])
    counter.level(replace(middle, resnets=middle.resnets[1:], num_heads=None), sizes[-1])
    for index, level in enumerate(config.up_levels()):
        counter.level(level, sizes[-1 - index])
        if level.resamples:
            counter.convolution(level.resnets[-1][1], level.resnets[-1][1], sizes[-2 - index])
    counter.convolution(config.block_out_channels[0], config.out_channels, sizes[0])
    return UNetCounts(counter.weights, counter.products)


class _Counter:
    """Adds up multiplications, part by part."""

    def __init__(self, config: UNetConfig, context_length: int) -> None:
        self.weights = self.products = 0
        self._config, self._context = config, context_length

    def linear(self, inputs: int, outputs: int, positions: int) -> None:
        self.weights += inputs * outputs * positions

    def convolution(self, inputs: int, outputs: int, size: tuple[int, int]) -> None:
        self.weights += _KERNEL * inputs * outputs * size[0] * size[1]

    def level(self, level: Level, size: tuple[int, int]) -> None:
        """Residual blocks, each with its attention where the level has any."""
        for inputs, outputs in level.resnets:
            self.convolution(inputs, outputs, size)
            self.convolution(outputs, outputs, size)
            self.linear(self._config.time_width, outputs, 1)
            if inputs != outputs:
                self.linear(inputs, outputs, size[0] * size[1])
            if level.num_heads is not None:
                self.attention(outputs, size[0] * size[1], level.num_layers)

    def attention(self, width: int, positions: int, layers: int) -> None:
        """A transformer: maps in and out, and per block self-attention, attention to the prompt, feed-forward."""
        context = self._context
        self.linear(width, 2 * width, positions)
        # Query, key, value, output; query and output; 8 widths up, gated to 4, and down again.
        self.weights += layers * (4 + 2 + 12) * width * width * positions
        self.weights += layers * 2 * self._config.cross_attention_dim * width * context
        self.products += layers * 2 * positions * (positions + context) * width
