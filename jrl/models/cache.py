# SPDX-License-Identifier: Apache-2.0
"""The cache: an explicit argument and result of decoding, one entry a layer, of the kind that its mixer needs."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jrl.mesh import constrain
from jrl.models.config import TransformerConfig
from jrl.models.products import reads_slices
from jrl.models.score_blocks import Operands

READ_COLUMNS = 256
"""A step of decoding reads so many columns of the cache, or a multiple. Each multiple is one more branch in the program
of every layer, and half of one is read in vain on average: 128 columns of 8 rows are a seventh of GPT-2's weights."""

Column = Int[Array, ""] | np.int32
"""A column of the cache: known while a program is traced, or not."""


class Places(NamedTuple):
    """Columns of new tokens, where every row has its own.

    Attributes:
      columns: Of each token; those of padding lie behind the cache, so that nothing of it is written.
      newest: The last column that a token of any row goes to.
    """

    columns: Int[Array, "B Q"]
    newest: Int[Array, ""]


class LayerCache(NamedTuple):
    """Keys and values of one layer. Heads come before positions: a decode step then transposes nothing.

    They lie in one buffer, or in several of `READ_COLUMNS` that follow each other: see `empty_buffers`.
    """

    k: tuple[Float[Array, "B K S H"], ...]
    v: tuple[Float[Array, "B K S H"], ...]

    def append(self, new: LayerCache, column: Column | Places) -> LayerCache:
        """This cache with new keys and values, of one buffer each, from `column` on, or at places of each row."""
        (k,), (v,) = new
        if isinstance(column, Places):
            return LayerCache(_place(self.k, k, column.columns), _place(self.v, v, column.columns))
        return LayerCache(_append(self.k, k, column), _append(self.v, v, column))


class LatentCache(NamedTuple):
    """Short vectors of one layer of latent attention: R numbers a column, then the rotary key.

    It lies in one buffer or in several, as `LayerCache` does.
    """

    latents: tuple[Float[Array, "B 1 S R"], ...]

    def append(self, new: Float[Array, "B 1 Q R"], column: Column | Places) -> LatentCache:
        """This cache with new columns, from `column` on, or at places of each row."""
        if isinstance(column, Places):
            return LatentCache(_place(self.latents, new, column.columns))
        return LatentCache(_append(self.latents, new, column))


class StateCache(NamedTuple):
    """State of one recurrent layer: as large after a thousand tokens as after one. Without a mixer there is none.

    Attributes:
      tails: Inputs of a convolution at the newest tokens, one array for each convolution; 0 before the first token.
      state: Of a recurrence, float32, (N, K, V) or of single channels (K, C); None: there is none.
    """

    tails: tuple[Float[Array, "B ..."], ...]
    state: Float[Array, "B ..."] | None = None

    def forget(self, counts: Int[Array, "B"], left: Int[Array, "B"]) -> StateCache:
        """The entry without the newest `counts` tokens of a row, after which `left` remain.

        It can leave out none or all; any other row becomes NaN.
        """
        kept = jnp.where(left == 0, 0.0, jnp.nan)

        def cut(x: Float[Array, "B ..."]) -> Float[Array, "B ..."]:
            shape = (-1,) + (1,) * (x.ndim - 1)
            return jnp.where((counts == 0).reshape(shape), x, kept.astype(x.dtype).reshape(shape))

        cut_entry: StateCache = jax.tree.map(cut, self)
        return cut_entry


class AttentionStateCache(NamedTuple):
    """Entry of one layer with attention and a recurrence side by side.

    Attributes:
      attention: Of attention.
      recurrence: Of the recurrence.
    """

    attention: LayerCache
    recurrence: StateCache

    def forget(self, counts: Int[Array, "B"], left: Int[Array, "B"]) -> AttentionStateCache:
        """The entry whose recurrence forgets; of attention the mask hides what is forgotten."""
        return self._replace(recurrence=self.recurrence.forget(counts, left))


LayerEntry = LayerCache | LatentCache | StateCache | AttentionStateCache
"""What a cache holds of one layer, by the kind of its mixer."""


class PartEntry(NamedTuple):
    """Entry of one layer for a part of the rows, which goes into that of all rows as soon as the layer has it.

    Attributes:
      own: Of the part.
      whole: Of all rows, by parts: every array has one more axis in front.
      number: Of the part.
    """

    own: LayerEntry
    whole: LayerEntry
    number: Int[Array, ""]

    def put(self, own: LayerEntry) -> LayerEntry:
        """The entry of all rows with that of the part, as the layer left it."""
        found: LayerEntry = jax.tree.map(
            lambda whole, part: jax.lax.dynamic_update_index_in_dim(whole, part, self.number, axis=0),
            *(self.whole, own),
        )
        return found


class Cache(NamedTuple):
    """Everything `decode` remembers of the rows.

    Attributes:
      layers: One entry a layer of the policy; buffers are per layer, so that a step updates each in place.
      value_layers: One entry a layer of the value branch.
      mask: True on columns that hold a real token.
      key_positions: Position of the token in each column.
      positions: Position of each row's next real token.
      column: The next column to write. Where it is the same in all rows, and a number of NumPy's, tracing knows it: so
        `init_cache` makes it, and a loop over tokens has an array. (B,) where rows have columns of their own: then
        padding takes none, on whichever side it stands.
      experts: Numbers of the experts that the token in each column visited, in each layer that has a mixture of them;
        −1 where there is no token. None: no record is kept.
    """

    layers: tuple[LayerEntry, ...]
    value_layers: tuple[LayerEntry, ...]
    mask: Bool[Array, "B S"]
    key_positions: Int[Array, "B S"]
    positions: Int[Array, "B"]
    column: Column | Int[Array, "B"]
    experts: Int[Array, "B S M k"] | None = None


def within(cache: Cache, whole: Cache, number: Int[Array, ""]) -> Cache:
    """A cache of a part of the rows, whose layers hand on that of all rows; see `PartEntry`.

    Those of a value branch are few, and hand on their own.
    """
    layers: Any = tuple(PartEntry(*pair, number) for pair in zip(cache.layers, whole.layers, strict=True))
    return cache._replace(layers=layers)


class NewTokens(NamedTuple):
    """Tokens that a cache is about to hold.

    Attributes:
      cache: It knows mask and positions of them; their keys and values are not in it yet.
      real: True on those that are no padding.
      positions: Theirs.
      column: Where they go.
      after: The cache as it is once their keys and values are in it.
    """

    cache: Cache
    real: Bool[Array, "B Q"]
    positions: Int[Array, "B Q"]
    column: Column | Places
    after: Cache

    @property
    def are_whole_rows(self) -> bool:
        """True where tracing knows that the cache is empty before them; one alone needs no attention of whole rows."""
        return isinstance(self.column, np.int32) and self.column == 0 and self.real.shape[1] > 1


def cache_tokens(cache: Cache, attention_mask: Bool[Array, "B Q"]) -> NewTokens:
    """Notes mask and positions of new tokens.

    Args:
      cache: Before them.
      attention_mask: True on those that are real.
    """
    arrived = jnp.cumsum(attention_mask.astype(jnp.int32), axis=1)
    positions = jnp.maximum(cache.positions[:, None] + arrived - 1, 0)
    if jnp.ndim(cache.column) == 0:
        at = (0, cache.column)
        cache = cache._replace(
            mask=jax.lax.dynamic_update_slice(cache.mask, attention_mask, at),
            key_positions=jax.lax.dynamic_update_slice(cache.key_positions, positions, at),
        )
        column: Column | Places = cache.column
        next_column: Any = cache.column + attention_mask.shape[1]
    else:
        columns = jnp.asarray(cache.column)[:, None] + arrived - 1
        newest = jnp.max(jnp.where(attention_mask, columns, 0))
        columns = jnp.where(attention_mask, columns, cache.mask.shape[1])
        cache = cache._replace(
            mask=_set_columns(cache.mask, attention_mask, columns),
            key_positions=_set_columns(cache.key_positions, positions, columns),
        )
        column, next_column = Places(columns, newest), cache.column + arrived[:, -1]
    after = cache._replace(positions=cache.positions + arrived[:, -1], column=next_column)
    return NewTokens(cache, attention_mask, positions, column, after)


def record_experts(new: NewTokens, chosen: Int[Array, "B Q M k"]) -> Int[Array, "B S M k"]:
    """The record of a cache that keeps one, with the experts of new tokens in it."""
    record = new.cache.experts
    assert record is not None, "whoever runs the layers asks first"
    chosen = jnp.where(new.real[:, :, None, None], chosen, -1).astype(record.dtype)
    if isinstance(new.column, Places):
        return _set_columns(record, chosen, new.column.columns)
    return jax.lax.dynamic_update_slice_in_dim(record, chosen, new.column, axis=1)


def own_columns(cache: Cache) -> Cache:
    """The cache with a column of its own for every row, to begin with the one that all had."""
    return cache._replace(column=jnp.broadcast_to(jnp.int32(cache.column), cache.positions.shape))


def forget(cache: Cache, counts: Int[Array, "B"]) -> Cache:
    """A cache with columns of each row's own, without the newest tokens of the rows.

    Args:
      cache: As `own_columns` made it.
      counts: How many of each row, at most as many as there are. Of a model with recurrent layers none or all: a state
        sums up all tokens, and one that should lose some of them becomes NaN.
    """
    column, positions = cache.column - counts, cache.positions - counts
    kept = jnp.arange(cache.mask.shape[1])[None, :] < column[:, None]

    def cut(entries: tuple[LayerEntry, ...]) -> tuple[LayerEntry, ...]:
        return tuple(
            entry.forget(counts, positions) if isinstance(entry, StateCache | AttentionStateCache) else entry
            for entry in entries
        )

    return cache._replace(
        layers=cut(cache.layers),
        value_layers=cut(cache.value_layers),
        mask=cache.mask & kept,
        positions=positions,
        column=column,
    )


def attend_written(
    attend: Callable[[Operands], Float[Array, "B Q N H"]], operands: Operands, column: Column | Places
) -> Float[Array, "B Q N H"]:
    """Attention to the columns of a cache that are written, and to few behind them, which the mask hides.

    Args:
      attend: Attention to all keys and values of its operands.
      operands: Queries of the newest columns, and whole buffers of keys and values that hold these columns already.
      column: Of the first query, or places of all.
    """
    queries, length = operands.q.shape[1], operands.num_keys
    if length <= READ_COLUMNS:
        return attend(operands)
    if isinstance(column, np.integer):
        return attend(operands.first_keys(int(column) + queries))
    # Rows with places of their own may bring few tokens each, whatever the number of queries.
    newest, least = (
        (column.newest, 1)
        if isinstance(column, Places)
        else (column + queries - 1, -(-queries // READ_COLUMNS))
    )
    lengths = [min(count * READ_COLUMNS, length) for count in range(least, -(-length // READ_COLUMNS) + 1)]
    branches = [functools.partial(_attend_first, attend, count) for count in lengths]
    attended: Array = jax.lax.switch(newest // READ_COLUMNS - (least - 1), branches, operands)
    return attended


def _attend_first(
    attend: Callable[[Operands], Float[Array, "B Q N H"]], length: int, operands: Operands
) -> Float[Array, "B Q N H"]:
    return attend(operands.first_keys(length))


def cached_kv_heads(num_heads: int, num_kv_heads: int) -> int:
    """Key/value heads after repetition to the mesh in force.

    Where the tensor axis splits the query heads but not the fewer key/value heads, these are repeated to the
    least common multiple, so that each device holds just the heads that its queries read.
    """
    mesh = jax.sharding.get_abstract_mesh()
    tensor = 1 if mesh.empty else mesh.shape["tensor"]
    return math.lcm(num_kv_heads, tensor) if num_heads % tensor == 0 else num_kv_heads


def empty_layer_cache(
    config: TransformerConfig, batch_size: int, length: int, dtype: Any, *, in_one: bool = False
) -> LayerCache:
    """Zeros: the columns are masked until they are written. `in_one` buffer, whatever a product reads best."""
    kv_heads = cached_kv_heads(config.num_heads, config.num_kv_heads)
    shape = (batch_size, kv_heads, length, config.head_dim)
    if in_one:
        k, v = (constrain_cache(jnp.zeros(shape, dtype)) for _ in ("k", "v"))
        return LayerCache((k,), (v,))
    return empty_buffers(shape, config.num_heads // kv_heads, dtype)


def empty_buffers(shape: tuple[int, int, int, int], num_sharing: int, dtype: Any) -> LayerCache:
    """Zeros of this shape, (rows, key/value heads, columns, width).

    They are one buffer where a product reads its first columns as they lie. Where it would copy these before each step,
    every step's branch of `attend_written` reads whole buffers.

    Args:
      shape: Of keys and of values.
      num_sharing: Queries that read one key/value head in a step.
      dtype: Of the numbers.
    """
    return LayerCache(_zeros(shape, num_sharing, dtype), _zeros(shape, num_sharing, dtype))


def empty_latents(shape: tuple[int, int, int, int], num_sharing: int, dtype: Any) -> LatentCache:
    """Zeros of this shape for latent attention, in one buffer or several as `empty_buffers` has them."""
    return LatentCache(_zeros(shape, num_sharing, dtype))


def _zeros(
    shape: tuple[int, int, int, int], num_sharing: int, dtype: Any
) -> tuple[Float[Array, "B K S H"], ...]:
    rows, kv_heads, length, width = shape
    lengths = [length]
    if length > READ_COLUMNS and not reads_slices(num_sharing):
        lengths = [min(READ_COLUMNS, length - start) for start in range(0, length, READ_COLUMNS)]
    return tuple(constrain_cache(jnp.zeros((rows, kv_heads, size, width), dtype)) for size in lengths)


def _append(
    buffers: tuple[Float[Array, "B K S H"], ...], new: Float[Array, "B K Q H"], column: Column
) -> tuple[Float[Array, "B K S H"], ...]:
    """Writes new columns into the buffers that they fall into."""
    new = new.astype(buffers[0].dtype)
    if len(buffers) == 1:
        return (constrain_cache(jax.lax.dynamic_update_slice(buffers[0], new, (0, 0, column, 0))),)
    starts = itertools.accumulate((buffer.shape[2] for buffer in buffers), initial=0)
    return tuple(
        _write_inside(buffer, new, column - start) for start, buffer in zip(starts, buffers, strict=False)
    )


def _place(
    buffers: tuple[Float[Array, "B K S H"], ...], new: Float[Array, "B K Q H"], columns: Int[Array, "B Q"]
) -> tuple[Float[Array, "B K S H"], ...]:
    """Writes new tokens at columns of each row's own; what lies behind all buffers is written nowhere."""
    new = new.astype(buffers[0].dtype)
    starts = itertools.accumulate((buffer.shape[2] for buffer in buffers), initial=0)

    def write(buffer: Float[Array, "B K S H"], start: int) -> Float[Array, "B K S H"]:
        inside = columns - start
        # A negative column would count from the end.
        inside = jnp.where(inside < 0, buffer.shape[2], inside)
        one = lambda row, own, at: row.at[:, at].set(own, mode="drop")  # noqa: E731
        return constrain_cache(jax.vmap(one)(buffer, new, inside))

    return tuple(write(buffer, start) for start, buffer in zip(starts, buffers, strict=False))


def _set_columns(rows: Array, new: Array, columns: Int[Array, "B Q"]) -> Array:
    """Rows (B S) with entries (B Q) at columns of each row's own; those behind the rows are dropped."""
    found: Array = jax.vmap(lambda row, own, at: row.at[at].set(own, mode="drop"))(rows, new, columns)
    return found


def _write_inside(
    buffer: Float[Array, "B K S H"], new: Float[Array, "B K Q H"], column: Column
) -> Float[Array, "B K S H"]:
    """The buffer with those of the new columns that it has; `column` may lie before or behind it.

    As many columns are written wherever they lie, in place, with what they held before if need be: a choice between two
    buffers would copy both.
    """
    count = new.shape[2]
    width = min(count, buffer.shape[2])
    at = jnp.clip(column, 0, buffer.shape[2] - width)
    first = at - column
    old = jax.lax.dynamic_slice_in_dim(buffer, at, width, axis=2)
    if count > 1:
        padded = jnp.pad(new, ((0, 0), (0, 0), (width, width), (0, 0)))
        start = width + jnp.clip(first, -width, count)
        new = jax.lax.dynamic_slice_in_dim(padded, start, width, axis=2)
    source = first + jnp.arange(width)
    is_new = ((source >= 0) & (source < count))[None, None, :, None]
    written = jnp.where(is_new, new, old)
    return constrain_cache(jax.lax.dynamic_update_slice_in_dim(buffer, written, at, axis=2))


def constrain_cache(x: Float[Array, "B K S H"]) -> Float[Array, "B K S H"]:
    """Pins keys or values to the mesh: rows and heads are split, positions never."""
    return constrain(x, "batch", "kv_heads", None, None)


def constrain_channels(x: Float[Array, "B T C"]) -> Float[Array, "B T C"]:
    """Pins channels, each with a state or a tail of its own, to the mesh: they are split as the width of an MLP is."""
    return constrain(x, "batch", None, "mlp")


def spread_kv_heads(num_heads: int, x: Float[Array, "B Q K H"]) -> Float[Array, "B R Q H"]:
    """Repeats the heads for the mesh in force, and puts them before the positions."""
    num_kv_heads = x.shape[2]
    # Whole on every device first: the partitioner would otherwise split the few heads and gather them again.
    x = constrain(x, "batch", None, "kv_heads", None)
    x = jnp.repeat(x, cached_kv_heads(num_heads, num_kv_heads) // num_kv_heads, axis=2)
    return constrain_cache(x.swapaxes(1, 2))
