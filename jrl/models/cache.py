# SPDX-License-Identifier: Apache-2.0
"""The key/value cache: an explicit argument and result of decoding, one buffer a layer."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jrl.mesh import constrain
from jrl.models.config import TransformerConfig


class LayerCache(NamedTuple):
    """Keys and values of one layer. Heads come before positions: a decode step then transposes nothing."""

    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S H"]

    def append(
        self, k: Float[Array, "B K Q H"], v: Float[Array, "B K Q H"], column: Int[Array, ""]
    ) -> LayerCache:
        """This cache with new keys and values from `column` on."""
        at = (0, 0, column, 0)
        return LayerCache(
            constrain_cache(jax.lax.dynamic_update_slice(self.k, k.astype(self.k.dtype), at)),
            constrain_cache(jax.lax.dynamic_update_slice(self.v, v.astype(self.v.dtype), at)),
        )


class Cache(NamedTuple):
    """Everything `decode` remembers of the rows.

    Attributes:
      layers: One entry a layer of the policy; buffers are per layer, so that a step updates each in place.
      value_layers: One entry a layer of the value branch.
      mask: True on columns that hold a real token.
      key_positions: Position of the token in each column.
      positions: Position of each row's next real token.
      column: The next column to write, the same in all rows.
    """

    layers: tuple[LayerCache, ...]
    value_layers: tuple[LayerCache, ...]
    mask: Bool[Array, "B S"]
    key_positions: Int[Array, "B S"]
    positions: Int[Array, "B"]
    column: Int[Array, ""]


def cache_tokens(cache: Cache, attention_mask: Bool[Array, "B Q"]) -> tuple[Cache, Int[Array, "B Q"], Cache]:
    """Notes mask and positions of new columns.

    Args:
      cache: Before them.
      attention_mask: True on the real tokens among them.
    Returns:
      The cache as `cached_context` wants it, the positions of the new tokens, and the cache as it is once their keys
      and values are in it.
    """
    arrived = jnp.cumsum(attention_mask.astype(jnp.int32), axis=1)
    positions = jnp.maximum(cache.positions[:, None] + arrived - 1, 0)
    at = (0, cache.column)
    cache = cache._replace(
        mask=jax.lax.dynamic_update_slice(cache.mask, attention_mask, at),
        key_positions=jax.lax.dynamic_update_slice(cache.key_positions, positions, at),
    )
    after = cache._replace(
        positions=cache.positions + arrived[:, -1], column=cache.column + attention_mask.shape[1]
    )
    return cache, positions, after


def cached_kv_heads(num_heads: int, num_kv_heads: int) -> int:
    """Key/value heads after repetition to the mesh in force.

    Where the tensor axis splits the query heads but not the fewer key/value heads, these are repeated to the
    least common multiple, so that each device holds just the heads that its queries read.
    """
    mesh = jax.sharding.get_abstract_mesh()
    tensor = 1 if mesh.empty else mesh.shape["tensor"]
    return math.lcm(num_kv_heads, tensor) if num_heads % tensor == 0 else num_kv_heads


def empty_layer_cache(config: TransformerConfig, batch_size: int, length: int, dtype: Any) -> LayerCache:
    """Zeros: the columns are masked until they are written."""
    shape = (batch_size, cached_kv_heads(config.num_heads, config.num_kv_heads), length, config.head_dim)
    zeros = jnp.zeros(shape, dtype)
    return LayerCache(constrain_cache(zeros), constrain_cache(jnp.zeros_like(zeros)))


def constrain_cache(x: Float[Array, "B K S H"]) -> Float[Array, "B K S H"]:
    """Pins keys or values to the mesh: rows and heads are split, positions never."""
    return constrain(x, "batch", "kv_heads", None, None)


def spread_kv_heads(num_heads: int, x: Float[Array, "B Q K H"]) -> Float[Array, "B R Q H"]:
    """Repeats the heads for the mesh in force, and puts them before the positions."""
    num_kv_heads = x.shape[2]
    # Whole on every device first: the partitioner would otherwise split the few heads and gather them again.
    x = constrain(x, "batch", None, "kv_heads", None)
    x = jnp.repeat(x, cached_kv_heads(num_heads, num_kv_heads) // num_kv_heads, axis=2)
    return constrain_cache(x.swapaxes(1, 2))
