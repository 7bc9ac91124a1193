# SPDX-License-Identifier: Apache-2.0
"""Attention of the encoder-decoder: scores without scale, and a learned bias for the distance of two tokens."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from jrl.mesh import constrain
from jrl.models.attention import attend, weight_dropout
from jrl.models.cache import Column, LayerCache, attend_written, spread_kv_heads
from jrl.models.layers import Projection
from jrl.models.score_blocks import Operands
from jrl.models.seq2seq_config import Seq2SeqConfig


def distance_buckets(num_buckets: int, max_distance: int) -> np.ndarray:
    """Bucket of every distance from 0 to `max_distance`: half of them for one distance each, then ever wider ones."""
    exact = num_buckets // 2
    distance = np.arange(max_distance + 1, dtype=np.float32)
    octaves = np.log(np.maximum(distance, 1) / np.float32(exact)) / np.float32(np.log(max_distance / exact))
    wide = exact + (octaves * np.float32(num_buckets - exact)).astype(np.int32)
    return np.where(distance < exact, distance, np.minimum(wide, num_buckets - 1)).astype(np.int32)


class RelativeBias(nn.Module):
    """Relative position bias: a term of the scores that depends on the distance of two tokens.

    Distances are those of columns. Padding lies before or behind the tokens of a row and never between them, so they
    are the distances of positions too, the same in all rows.

    Attributes:
      config: The model.
      both_ways: Keys behind the query have buckets of their own; otherwise nobody reads them.
    """

    config: Seq2SeqConfig
    both_ways: bool

    @nn.compact
    def __call__(self, queries: Int[Array, "Q"], keys: Int[Array, "S"]) -> Float[Array, "1 N Q S"]:
        """The bias of every head, float32."""
        config = self.config
        init = nn.initializers.normal(config.init_factor * config.width**-0.5)
        table = self.param("embedding", init, (config.num_buckets, config.num_heads), jnp.float32)
        num_buckets = config.num_buckets // 2 if self.both_ways else config.num_buckets
        buckets = jnp.asarray(distance_buckets(num_buckets, config.max_distance))
        ahead = keys[None, :] - queries[:, None]
        distance = jnp.abs(ahead) if self.both_ways else jnp.maximum(-ahead, 0)
        bucket = buckets[jnp.minimum(distance, config.max_distance)]
        if self.both_ways:
            bucket = bucket + jnp.where(ahead > 0, num_buckets, 0)
        bias = jnp.moveaxis(table.astype(jnp.float32)[bucket], -1, 0)[None]
        return constrain(bias, None, "heads", None, None)


class RelativeAttention(nn.Module):
    """Multi-head attention without scale, over the stream itself or over the encoder's output.

    Attributes:
      config: The model.
      dtype: Of the computation; scores and softmax are float32 always.
    """

    config: Seq2SeqConfig
    dtype: Any

    def setup(self) -> None:
        """Names the projections."""
        config = self.config
        width, heads = (config.width,), (config.num_heads, config.head_dim)

        def project(inputs: tuple[int, ...], outputs: tuple[int, ...], fan: int) -> Projection:
            return Projection(inputs, outputs, False, config.init_factor * fan**-0.5, self.dtype)

        # Scores are not scaled, so fresh queries are: their fan counts the head's width too.
        self.q = project(width, heads, config.width * config.head_dim)
        self.k, self.v = project(width, heads, config.width), project(width, heads, config.width)
        self.o = project(heads, width, config.num_heads * config.head_dim)
        self.dropout = nn.Dropout(config.dropout)

    def memory(self, source: Float[Array, "B S D"]) -> LayerCache:
        """Keys and values of what is read."""
        heads = self.config.num_heads
        k, v = (spread_kv_heads(heads, project(source)) for project in (self.k, self.v))
        return LayerCache((k,), (v,))

    def __call__(
        self,
        x: Float[Array, "B Q D"],
        memory: LayerCache,
        mask: Bool[Array, "B Q S"],
        bias: Float[Array, "1 N Q S"] | None = None,
        column: Column | None = None,
    ) -> Float[Array, "B Q D"]:
        """Output of attention, to be added to the residual stream; `column` is that of the queries in a cache."""
        q = constrain(self.q(x), "batch", None, "heads", None)
        operands = Operands(q, *memory, mask, bias)
        whole = functools.partial(attend, scale=1.0, dropout=weight_dropout(self.dropout))
        out = whole(operands) if column is None else attend_written(whole, operands, column)
        return self.o(constrain(out, "batch", None, "heads", None))
