# SPDX-License-Identifier: Apache-2.0
"""Attention of one new token a row to the cache, by one kernel in Pallas' Triton dialect, on NVIDIA GPUs.

Each row says where the columns begin and end that its query may read. The kernel reads the blocks of the cache that
hold them, and writes the new key and value into it. By einsums a token of a layer takes nine kernels and a choice
between lengths, which cost more time than reading. Figures: `docs/performance.md`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jrl.mesh import partition_spec, platform
from jrl.models.cache import LayerCache
from jrl.models.config import TransformerConfig
from jrl.models.score_blocks import MASKED_SCORE

BLOCK = 64
"""Columns that the kernel reads at a time; the cache has a multiple of them."""
_HEADS = 16
"""Queries of a block: the fewest rows of a matrix product on these devices."""
_WIDTHS = (16, 32, 64, 128, 256)
"""Widths of heads that the kernel takes: powers of two."""
_WARPS, _STAGES = 4, 2
"""Warps of a program, and blocks of the cache at work in it: as JAX's decoding kernel had them when it was measured."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("starts", "stops", "columns", "fill"), meta_fields=()
)
@dataclass(frozen=True)
class KeySpans:
    """Columns that the newest token of each row reads, itself included.

    Attributes:
      starts: The first one.
      stops: The one behind the last; a row that reads none has the same as `starts`.
      columns: Where the cache takes the newest token, behind which no row reads; a token whose column lies behind the
        cache is written nowhere.
      fill: Added to the output: 0; NaN in a row whose columns do not follow each other.
    """

    starts: Int[Array, "B"]
    stops: Int[Array, "B"]
    columns: Int[Array, "B"]
    fill: Float[Array, "B"]


def decodes_by_kernel(attention: str | None, config: TransformerConfig, compute_dtype: Any) -> bool:
    """True where the kernel serves a model whose whole rows attend by this implementation: by cuDNN's alone.

    A JAX without Pallas' Triton dialect, which is deprecated since 0.11.0, has no such kernel.
    """
    if attention != "cudnn":
        return False
    is_read = jnp.dtype(compute_dtype) == jnp.bfloat16 and all(width in _WIDTHS for width in config.head_dims)
    return is_read and _triton() is not None


def whole_blocks(length: int) -> int:
    """Columns of a cache that holds at least `length`."""
    return -(-length // BLOCK) * BLOCK


def key_spans(mask: Bool[Array, "B 1 S"], columns: Int[Array, "B"]) -> KeySpans:
    """Spans of the columns that are True, of which the newest token takes `columns`.

    A row with others between them becomes NaN, rather than something that looks like a result.
    """
    readable = mask[:, 0]
    starts = jnp.argmax(readable, axis=1).astype(jnp.int32)
    stops = starts + readable.sum(axis=1, dtype=jnp.int32)
    places = jnp.arange(readable.shape[1])[None, :]
    between = (places >= starts[:, None]) & (places < stops[:, None])
    fill = jnp.where((between == readable).all(axis=1), 0.0, jnp.nan)
    return KeySpans(starts, stops, columns.astype(jnp.int32), fill)


def attend_spans(
    q: Float[Array, "B 1 N H"],
    new: LayerCache | None,
    cache: LayerCache,
    spans: KeySpans,
    *,
    scale: float,
) -> tuple[Float[Array, "B 1 N H"], LayerCache]:
    """Softmax attention of one query a row, N query heads over K key/value heads. It has no derivative.

    Where this is no GPU the kernel is interpreted.

    Args:
      q: Queries.
      new: Keys and values of the newest tokens, one column; None: the cache has them already.
      cache: In one buffer, a multiple of `BLOCK` columns.
      spans: What each row reads; 0 comes out of a row that reads nothing.
      scale: Multiplies the scores.
    Returns:
      The output, and the cache with the newest tokens in it.
    """
    local = functools.partial(_attend, scale=scale)
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        # The partitioner cannot split a kernel: it would gather all rows on every device.
        (k,), _ = cache
        queries, keys = (
            partition_spec(mesh, ("batch", name, *(None,) * (x.ndim - 2)), x.shape)[0]
            for name, x in (("heads", q[:, 0]), ("kv_heads", k))
        )
        in_specs = queries, None if new is None else keys, keys, PartitionSpec(queries[0])
        local = jax.shard_map(local, in_specs=in_specs, out_specs=(queries, keys), check_vma=False)
    out, cache = local(q[:, 0], new, cache, spans)
    return out[:, None], cache


@functools.cache
def _triton() -> Any:
    """Pallas' Triton dialect; None in a JAX without it."""
    # Imported late: Pallas takes a third of a second, and no CPU has use for it.
    try:
        from jax.experimental.pallas import triton
    except ImportError:
        return None
    return triton


def _attend(
    q: Float[Array, "B N H"], new: LayerCache | None, cache: LayerCache, spans: KeySpans, *, scale: float
) -> tuple[Float[Array, "B N H"], LayerCache]:
    """The kernel, on the rows and heads of one device."""
    from jax.experimental import pallas as pl

    (k,), (v,) = cache
    num_rows, kv_heads, length, width = k.shape
    group = q.shape[1] // kv_heads
    # One array, so that XLA needs but one kernel to write what this one reads.
    tokens = q
    if new is not None:
        tokens = jnp.concatenate([q, *(x[:, :, 0].astype(q.dtype) for (x,) in new)], axis=1)
    number = pl.BlockSpec((None,), lambda row, head, part: (row,))
    token = pl.BlockSpec((None, tokens.shape[1], width), lambda row, head, part: (row, 0, 0))
    buffer = pl.BlockSpec((None, None, length, width), lambda row, head, part: (row, head, 0, 0))
    queries = pl.BlockSpec((None, None, _HEADS, width), lambda row, head, part: (row, head, part, 0))
    results = [(jax.ShapeDtypeStruct((num_rows, kv_heads, group, width), q.dtype), queries)]
    if new is not None:
        results += [(jax.ShapeDtypeStruct(x.shape, x.dtype), buffer) for x in (k, v)]
    out, *after = pl.pallas_call(
        functools.partial(_kernel, scale=scale, group=group, kv_heads=kv_heads),
        grid=(num_rows, kv_heads, pl.cdiv(group, _HEADS)),
        in_specs=[token, buffer, buffer, *[number] * 4],
        out_specs=[spec for _, spec in results],
        out_shape=[shape for shape, _ in results],
        # The cache is written where it lies.
        input_output_aliases={} if new is None else {1: 1, 2: 2},
        compiler_params=_triton().CompilerParams(num_warps=_WARPS, num_stages=_STAGES),
        interpret=platform() != "gpu",
        name="attend_spans",
    )(tokens, k, v, spans.starts, spans.stops, spans.columns, spans.fill)
    if after:
        cache = LayerCache(*((x,) for x in after))
    return out.reshape(q.shape), cache


def _kernel(
    tokens: Any,
    k: Any,
    v: Any,
    starts: Any,
    stops: Any,
    columns: Any,
    fill: Any,
    out: Any,
    *after: Any,
    scale: float,
    group: int,
    kv_heads: int,
) -> None:
    """Queries of one row that share a key/value head, over blocks of its columns: a running maximum, and sums.

    (Dao et al. 2022, arXiv:2205.14135, algorithm 1.) Where the newest column is not in the cache yet, `tokens` has its
    key and value behind the queries: that column is read first, and is written into the cache `after`.
    """
    from jax.experimental import pallas as pl

    triton = _triton()
    head, part = pl.program_id(1), pl.program_id(2)
    inside = part * _HEADS + jnp.arange(_HEADS)
    own = head * group + jnp.minimum(inside, group - 1)
    queries = triton.load(tokens.at[own[:, None], jnp.arange(k.shape[1])[None, :]])
    start, stop = starts[...], stops[...]
    largest = jnp.full((_HEADS,), MASKED_SCORE, jnp.float32)
    total = jnp.zeros((_HEADS,), jnp.float32)
    sums = jnp.zeros(queries.shape, jnp.float32)
    if after:
        column = columns[...]
        first = group * kv_heads + head
        new_k, new_v = (tokens[pl.ds(place, 1), :] for place in (first, first + kv_heads))
        for cache, new in zip(after, (new_k, new_v), strict=True):
            at = jnp.minimum(column, k.shape[0] - 1)
            triton.store(cache.at[pl.ds(at, 1), :], new, mask=jnp.full(new.shape, column < k.shape[0]))
        is_newest_read = (column >= start) & (column < stop)
        scores = scale * jnp.sum(queries.astype(jnp.float32) * new_k.astype(jnp.float32), axis=1)
        largest = jnp.where(is_newest_read, scores, MASKED_SCORE)
        total = jnp.where(is_newest_read, 1.0, total)
        sums = jnp.where(is_newest_read, new_v.astype(jnp.float32), sums)
        stop = jnp.minimum(stop, column)

    def read(block: Any, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        largest, total, sums = carry
        places = block * BLOCK + jnp.arange(BLOCK)
        is_read = (places >= start) & (places < stop)
        here = pl.ds(block * BLOCK, BLOCK)
        scores = scale * triton.dot(queries, k[here, :].T)
        highest = jnp.maximum(largest, jnp.max(jnp.where(is_read[None, :], scores, MASKED_SCORE), axis=1))
        weights = jnp.where(is_read[None, :], jnp.exp(scores - highest[:, None]), 0.0)
        # The newest column's old value may be anything; 0 times NaN is NaN.
        values = jnp.where(is_read[:, None], v[here, :], 0)
        shrunk = jnp.exp(largest - highest)
        added = triton.dot(weights.astype(values.dtype), values)
        return highest, shrunk * total + jnp.sum(weights, axis=1), shrunk[:, None] * sums + added

    blocks = (start // BLOCK, (stop + BLOCK - 1) // BLOCK)
    largest, total, sums = jax.lax.fori_loop(*blocks, read, (largest, total, sums))
    # Only a row that reads nothing has no weight.
    mean = sums / jnp.where(total > 0, total, 1.0)[:, None] + fill[...]
    triton.store(out.at[pl.ds(0, _HEADS), :], mean.astype(out.dtype), mask=(inside < group)[:, None])
