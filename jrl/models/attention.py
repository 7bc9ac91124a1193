# SPDX-License-Identifier: Apache-2.0
"""Causal attention with grouped key/value heads, rotary or learned positions, and an explicit cache.

Plain einsums with a float32 softmax: exact, and on a CPU as fast as fused forms. Padding may be on either
side.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from jrl.mesh import constrain
from jrl.models.config import TransformerConfig

MASKED_SCORE = float(np.finfo(np.float32).min)


class AttentionContext(NamedTuple):
    """What every layer's attention needs to know of the rows.

    Attributes:
      mask: True where query q may read key s.
      cos: Of the rotation at each query's position; None with learned positions.
      sin: The same.
      column: Where the cache takes the next keys; None without a cache.
    """

    mask: Bool[Array, "B Q S"]
    cos: Float[Array, "B Q H/2"] | None
    sin: Float[Array, "B Q H/2"] | None
    column: Int[Array, ""] | None = None


class LayerCache(NamedTuple):
    """Keys and values of one layer. Heads come before positions: a decode step then transposes nothing."""

    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S H"]


class Cache(NamedTuple):
    """Everything `decode` remembers of the rows.

    Attributes:
      layers: One entry a layer of the policy; buffers are per layer, so that a step updates each in place.
      value_layers: One entry a layer of the value branch.
      mask: True on columns that hold a real token.
      positions: Position of each row's next real token.
      column: The next column to write, the same in all rows.
    """

    layers: tuple[LayerCache, ...]
    value_layers: tuple[LayerCache, ...]
    mask: Bool[Array, "B S"]
    positions: Int[Array, "B"]
    column: Int[Array, ""]


def token_positions(
    attention_mask: Bool[Array, "B L"], segment_ids: Int[Array, "B L"] | None = None
) -> Int[Array, "B L"]:
    """Position of every token, counted over the real ones: the same whatever the padding and its side.

    Padding gets a position too (0 on the left), which nothing reads.

    Args:
      attention_mask: True on real tokens.
      segment_ids: Of packed rows; positions restart where the id changes. None: one segment.
    """
    counts = jnp.cumsum(attention_mask.astype(jnp.int32), axis=1)
    positions = jnp.maximum(counts - 1, 0)
    if segment_ids is None:
        return positions
    starts = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    before = jax.lax.cummax(jnp.where(starts, counts - attention_mask, 0), axis=1)
    return jnp.maximum(counts - 1 - before, 0)


def full_context(
    config: TransformerConfig,
    attention_mask: Bool[Array, "B L"],
    positions: Int[Array, "B L"],
    segment_ids: Int[Array, "B L"] | None = None,
) -> AttentionContext:
    """Context of whole rows, scored in one pass: causal, real keys only, and inside a segment."""
    columns = jnp.arange(attention_mask.shape[1])
    mask = (columns[None, :, None] >= columns[None, None, :]) & attention_mask[:, None, :]
    if segment_ids is not None:
        mask &= segment_ids[:, :, None] == segment_ids[:, None, :]
    return AttentionContext(mask, *rotations(config, positions))


def cached_context(config: TransformerConfig, cache: Cache, positions: Int[Array, "B Q"]) -> AttentionContext:
    """Context of new columns, which read all cached before them. `cache.mask` already knows the new ones."""
    queries = cache.column + jnp.arange(positions.shape[1])
    columns = jnp.arange(cache.mask.shape[1])
    mask = (queries[None, :, None] >= columns[None, None, :]) & cache.mask[:, None, :]
    return AttentionContext(mask, *rotations(config, positions), cache.column)


def rotations(
    config: TransformerConfig, positions: Int[Array, "B Q"]
) -> tuple[Float[Array, "B Q H/2"] | None, Float[Array, "B Q H/2"] | None]:
    """Cosine and sine of the rotary angles, float32; (None, None) with learned positions."""
    if config.rope is None:
        return None, None
    frequencies = jnp.asarray(config.rope.frequencies(config.head_dim))
    angles = positions[:, :, None].astype(jnp.float32) * frequencies[None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "B Q N H"], cos: Float[Array, "B Q H/2"], sin: Float[Array, "B Q H/2"]
) -> Float[Array, "B Q N H"]:
    """Rotates the first half of every head against the second."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def cached_kv_heads(config: TransformerConfig) -> int:
    """Key/value heads after repetition to the mesh in force.

    Where the tensor axis splits the query heads but not the fewer key/value heads, these are repeated to the
    least common multiple, so that each device holds just the heads that its queries read.
    """
    mesh = jax.sharding.get_abstract_mesh()
    tensor = 1 if mesh.empty else mesh.shape["tensor"]
    return math.lcm(config.num_kv_heads, tensor) if config.num_heads % tensor == 0 else config.num_kv_heads


def empty_layer_cache(config: TransformerConfig, batch_size: int, length: int, dtype: Any) -> LayerCache:
    """Zeros: the columns are masked until they are written."""
    shape = (batch_size, cached_kv_heads(config), length, config.head_dim)
    zeros = jnp.zeros(shape, dtype)
    return LayerCache(_constrain_cache(zeros), _constrain_cache(jnp.zeros_like(zeros)))


def _constrain_cache(x: Array) -> Array:
    return constrain(x, "batch", "kv_heads", None, None)


def _spread_kv_heads(config: TransformerConfig, x: Float[Array, "B Q K H"]) -> Float[Array, "B R Q H"]:
    """Repeats the heads for the mesh in force, and puts them before the positions."""
    # Whole on every device first: the partitioner would otherwise split the few heads and gather them again.
    x = constrain(x, "batch", None, "kv_heads", None)
    x = jnp.repeat(x, cached_kv_heads(config) // config.num_kv_heads, axis=2)
    return _constrain_cache(x.swapaxes(1, 2))


class Projection(nn.Module):
    """A linear map that contracts the last axes of its input: `kernel` is (*inputs, *outputs).

    Attributes:
      inputs: Sizes of the axes contracted.
      outputs: Sizes of the axes made.
      use_bias: Adds a bias of shape `outputs`.
      init_range: Standard deviation of a fresh kernel.
      dtype: Of the computation; parameters keep their own.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    use_bias: bool
    init_range: float
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """(..., *inputs) to (..., *outputs)."""
        init = nn.initializers.normal(self.init_range)
        kernel = self.param("kernel", init, (*self.inputs, *self.outputs), jnp.float32)
        axes = tuple(range(len(self.inputs)))
        contracted = tuple(axis + x.ndim - len(self.inputs) for axis in axes)
        y = jax.lax.dot_general(
            x.astype(self.dtype), kernel.astype(self.dtype), ((contracted, axes), ((), ()))
        )
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros_init(), self.outputs, jnp.float32)
            y += bias.astype(self.dtype).reshape((1,) * (y.ndim - bias.ndim) + bias.shape)
        return y


def residual_init_range(config: TransformerConfig) -> float:
    """Standard deviation of fresh kernels that write to the residual stream."""
    return config.init_range / math.sqrt(2 * config.num_layers if config.scale_residual_init else 1)


class Attention(nn.Module):
    """Causal self-attention of one block.

    Attributes:
      config: The decoder.
      dtype: Of the computation; scores and softmax are float32 always.
    """

    config: TransformerConfig
    dtype: Any

    def setup(self) -> None:
        """Names the projections."""
        config = self.config

        def project(num_heads: int) -> Projection:
            return Projection(
                (config.width,), (num_heads, config.head_dim), config.qkv_bias, config.init_range, self.dtype
            )

        self.q = project(config.num_heads)
        self.k = project(config.num_kv_heads)
        self.v = project(config.num_kv_heads)
        self.o = Projection(
            (config.num_heads, config.head_dim),
            (config.width,),
            config.attention_out_bias,
            residual_init_range(config),
            self.dtype,
        )
        self.dropout = nn.Dropout(config.attention_dropout)

    def __call__(
        self, x: Float[Array, "B Q D"], context: AttentionContext, cache: LayerCache | None
    ) -> tuple[Float[Array, "B Q D"], LayerCache | None]:
        """What attention adds to the residual stream, and the cache with the new keys and values."""
        q, k, v = self.q(x), self.k(x), self.v(x)
        if context.cos is not None and context.sin is not None:
            q, k = rotate(q, context.cos, context.sin), rotate(k, context.cos, context.sin)
        q = constrain(q, "batch", None, "heads", None)
        k, v = _spread_kv_heads(self.config, k), _spread_kv_heads(self.config, v)
        if cache is not None:
            assert context.column is not None
            at = (0, 0, context.column, 0)
            cache = LayerCache(
                _constrain_cache(jax.lax.dynamic_update_slice(cache.k, k.astype(cache.k.dtype), at)),
                _constrain_cache(jax.lax.dynamic_update_slice(cache.v, v.astype(cache.v.dtype), at)),
            )
            k, v = cache
        out = self._attend(q, k, v, context.mask)
        return self.o(constrain(out, "batch", None, "heads", None)), cache

    def _attend(self, q: Array, k: Array, v: Array, mask: Array) -> Array:
        rows, queries, heads, head_dim = q.shape
        kv_heads = k.shape[1]
        # All queries that read one key/value head form one matrix: the cache is multiplied as it lies.
        q = (q * head_dim**-0.5).swapaxes(1, 2).reshape(rows, kv_heads, -1, head_dim)
        scores = jnp.einsum("bkmh,bksh->bkms", q, k, preferred_element_type=jnp.float32)
        scores = scores.reshape(rows, heads, queries, -1)
        # A finite floor, not −inf: a row without any key (padding) averages garbage instead of making NaN.
        scores = jnp.where(mask[:, None], scores, MASKED_SCORE)
        weights = jax.nn.softmax(scores, axis=-1)
        weights = self.dropout(weights, deterministic=not self.has_rng("dropout"))
        weights = weights.astype(v.dtype).reshape(rows, kv_heads, -1, scores.shape[-1])
        out = jnp.einsum("bkms,bksh->bkmh", weights, v, preferred_element_type=jnp.float32)
        return out.astype(self.dtype).reshape(rows, heads, queries, head_dim).swapaxes(1, 2)
