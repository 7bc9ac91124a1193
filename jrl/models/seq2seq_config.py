# SPDX-License-Identifier: Apache-2.0
"""Description of an encoder-decoder, to which T5 checkpoints are mapped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jrl.models.config import VOCAB_MULTIPLE


@dataclass(frozen=True)
class Seq2SeqConfig:
    """Description of an encoder-decoder with relative positions (Raffel et al. 2020, arXiv:1910.10683). Hashable.

    Attributes:
      vocab_size: Real entries of the vocabulary, before padding.
      width: D, size of both residual streams.
      num_encoder_layers: Blocks of the encoder.
      num_layers: Blocks of the decoder.
      num_heads: N, of every attention.
      head_dim: H; N · H need not be D.
      mlp_width: Inner width of the MLPs.
      activation: Of the MLPs.
      gated_mlp: The MLP is down(act(gate(x)) · up(x)) rather than down(act(up(x))).
      norm_epsilon: Added to the variance; all norms are RMSNorm.
      tie_embeddings: The head is the transposed embedding.
      logit_scale: Multiplies what the head reads; None: not.
      num_buckets: Rows of a table of relative positions.
      max_distance: Distances from here on share the last bucket.
      decoder_start_token_id: First id of every decoder row.
      bias_in_every_layer: Every self-attention has a table of relative positions; otherwise a stack shares one.
      dropout: Rate everywhere; acts only where a dropout key is given.
      init_factor: Multiplies the standard deviations of fresh weights.
    """

    vocab_size: int
    width: int
    num_encoder_layers: int
    num_layers: int
    num_heads: int
    head_dim: int
    mlp_width: int
    activation: Literal["gelu", "gelu_tanh", "relu", "silu"]
    gated_mlp: bool
    norm_epsilon: float
    tie_embeddings: bool
    logit_scale: float | None
    num_buckets: int
    max_distance: int
    decoder_start_token_id: int
    bias_in_every_layer: bool = False
    dropout: float = 0.0
    init_factor: float = 1.0

    @property
    def rounds_embeddings(self) -> bool:
        """True where an embedding is rounded to the compute dtype before anything is done with it."""
        return True

    @property
    def padded_vocab_size(self) -> int:
        """`vocab_size` rounded up to a multiple of 64."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
