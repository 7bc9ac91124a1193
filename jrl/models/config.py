# SPDX-License-Identifier: Apache-2.0
"""What a decoder looks like: one small frozen description that every family maps its own config to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

VOCAB_MULTIPLE = 64
"""The vocabulary is padded to this on every mesh, so that one parameter tree fits all of them."""


@dataclass(frozen=True)
class LinearRopeScaling:
    """Positions are divided by `factor` (Chen et al. 2023, arXiv:2306.15595)."""

    factor: float

    def scale(self, frequencies: np.ndarray) -> np.ndarray:
        """Rescales the inverse frequencies, (H/2,)."""
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated (Llama 3.1).

    Attributes:
      factor: Stretch of wavelengths above `original_max_positions / low_freq_factor`.
      low_freq_factor: Sets where the stretched wavelengths begin.
      high_freq_factor: Sets where the untouched wavelengths end; larger than `low_freq_factor`.
      original_max_positions: Context of the pre-training, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def scale(self, frequencies: np.ndarray) -> np.ndarray:
        """Rescales the inverse frequencies, (H/2,)."""
        turns = self.original_max_positions * frequencies / (2 * math.pi)
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        return (1 - smooth) * frequencies / self.factor + smooth * frequencies


@dataclass(frozen=True)
class Rope:
    """Rotary positions (Su et al. 2021, arXiv:2104.09864), halves rotated against each other.

    Attributes:
      theta: Base of the wavelengths.
      scaling: How the context was stretched after pre-training; None where it was not.
    """

    theta: float
    scaling: LinearRopeScaling | Llama3RopeScaling | None = None

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Radians a position for each pair of dimensions, (head_dim / 2,) float32."""
        frequencies = 1.0 / self.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        if self.scaling is not None:
            frequencies = self.scaling.scale(frequencies)
        return frequencies.astype(np.float32)


@dataclass(frozen=True)
class TransformerConfig:
    """One decoder. Hashable, so it can be a static argument.

    Attributes:
      vocab_size: Real entries of the vocabulary, before padding.
      width: D, size of the residual stream.
      num_layers: Number of blocks.
      num_heads: N, query heads.
      num_kv_heads: K, key/value heads; divides `num_heads`.
      head_dim: H.
      mlp_width: Inner width of the MLP.
      max_positions: Longest context, in tokens: rows of the table where positions are learned.
      activation: Of the MLP.
      gated_mlp: The MLP is down(act(gate(x)) · up(x)) rather than down(act(up(x))).
      norm: LayerNorm, or RMSNorm (no mean, no bias).
      norm_epsilon: Added to the variance.
      rope: Rotary positions; None means a learned table.
      qkv_bias: q, k and v have a bias.
      attention_out_bias: o has a bias.
      mlp_bias: The MLP has biases.
      tie_embeddings: The head is the transposed embedding.
      embedding_dropout: Rate after the embedding. All three act only where a dropout key is given.
      attention_dropout: Rate on the attention weights.
      residual_dropout: Rate on what each sublayer adds.
      init_range: Standard deviation of fresh weights.
      scale_residual_init: Fresh o and down kernels get `init_range / sqrt(2 · num_layers)` (GPT-2).
    """

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    max_positions: int
    activation: Literal["gelu", "gelu_tanh", "relu", "silu"]
    gated_mlp: bool
    norm: Literal["layer", "rms"]
    norm_epsilon: float
    rope: Rope | None
    qkv_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    tie_embeddings: bool
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    init_range: float = 0.02
    scale_residual_init: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError on sizes that do not fit together."""
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"`num_kv_heads` must divide num_heads = {self.num_heads} (grouped-query attention), "
                f"got {self.num_kv_heads}."
            )
        if self.rope is not None and self.head_dim % 2:
            raise ValueError(
                f"`head_dim` must be even, got {self.head_dim}: rotary positions rotate its two halves."
            )

    @property
    def padded_vocab_size(self) -> int:
        """`vocab_size` rounded up to a multiple of 64."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
