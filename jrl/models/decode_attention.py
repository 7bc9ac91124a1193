# SPDX-License-Identifier: Apache-2.0
"""Attention of one new token a row to the cache, by the decoding kernel that ships with JAX, on NVIDIA GPUs.

Each row says where the columns begin and end that its query may read. The kernel reads the blocks of the cache up to
the last of them. By einsums a token of a layer takes nine kernels and a choice between lengths, which cost more time
than reading. Figures: `benchmarks/README.md`.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jrl.mesh import partition_spec, platform
from jrl.models.config import TransformerConfig

BLOCK = 64
"""Columns that the kernel reads at a time; the cache has a multiple of them."""
_HEADS = 16
"""Queries of a block: the fewest rows of a matrix product on these devices."""
_WIDTHS = (16, 32, 64, 128, 256)
"""Widths of heads that the kernel takes: powers of two."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=("starts", "stops", "fill"), meta_fields=())
@dataclass(frozen=True)
class KeySpans:
    """Columns that the newest token of each row reads.

    Attributes:
      starts: The first one.
      stops: The one behind the last; a row that reads none has the same as `starts`.
      fill: Added to the output: 0; NaN in a row whose columns do not follow each other.
    """

    starts: Int[Array, "B"]
    stops: Int[Array, "B"]
    fill: Float[Array, "B"]


def decodes_by_kernel(attention: str | None, config: TransformerConfig, compute_dtype: Any) -> bool:
    """True where the kernel serves a model whose whole rows attend by this implementation: by cuDNN's alone.

    It leaves its sums unnormalised in the compute dtype, where float16 could overflow. A JAX that no longer ships the
    kernel has none.
    """
    if attention != "cudnn":
        return False
    is_read = jnp.dtype(compute_dtype) == jnp.bfloat16 and all(width in _WIDTHS for width in config.head_dims)
    return is_read and _kernel() is not None


def whole_blocks(length: int) -> int:
    """Columns of a cache that holds at least `length`."""
    return -(-length // BLOCK) * BLOCK


def key_spans(mask: Bool[Array, "B 1 S"]) -> KeySpans:
    """Spans of the columns that are True.

    A row with others between them becomes NaN, rather than something that looks like a result.
    """
    readable = mask[:, 0]
    starts = jnp.argmax(readable, axis=1).astype(jnp.int32)
    stops = starts + readable.sum(axis=1, dtype=jnp.int32)
    columns = jnp.arange(readable.shape[1])[None, :]
    between = (columns >= starts[:, None]) & (columns < stops[:, None])
    return KeySpans(starts, stops, jnp.where((between == readable).all(axis=1), 0.0, jnp.nan))


def attend_spans(
    q: Float[Array, "B 1 N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    spans: KeySpans,
    *,
    scale: float,
) -> Float[Array, "B 1 N H"]:
    """Softmax attention of one query a row, N query heads over K key/value heads. It has no derivative.

    Where this is no GPU the kernel is interpreted.

    Args:
      q: Queries.
      k: Keys, heads before positions; a multiple of `BLOCK` columns.
      v: Values, likewise.
      spans: What each row reads; 0 comes out of a row that reads nothing.
      scale: Multiplies the scores.
    """
    local = functools.partial(_attend, scale=scale)
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        # The partitioner cannot split a kernel: it would gather all rows on every device.
        queries, keys = (
            partition_spec(mesh, ("batch", name, *(None,) * (x.ndim - 2)), x.shape)[0]
            for name, x in (("heads", q[:, 0]), ("kv_heads", k))
        )
        rows = PartitionSpec(queries[0])
        local = jax.shard_map(
            local, in_specs=(queries, keys, keys, rows, rows), out_specs=queries, check_vma=False
        )
    out = local(q[:, 0], k, v, spans.starts, spans.stops)
    return (out + spans.fill[:, None, None].astype(out.dtype))[:, None]


@functools.cache
def _kernel() -> Any:
    """`gqa` of JAX's decoding kernels; None in a JAX without them. They are deprecated since 0.11.2."""
    # Imported late: Pallas takes a third of a second, and no CPU has use for it.
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        try:
            from jax.experimental.pallas.ops.gpu.decode_attention import gqa
        except ImportError:
            return None
    return gqa


def _attend(
    q: Float[Array, "B N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    starts: Int[Array, "B"],
    stops: Int[Array, "B"],
    *,
    scale: float,
) -> Float[Array, "B N H"]:
    """The kernel, on the rows and heads of one device."""
    sums, (totals, _) = _kernel()(
        q,
        k.swapaxes(1, 2),
        v.swapaxes(1, 2),
        starts,
        stops,
        sm_scale=scale,
        block_h=_HEADS,
        block_k=BLOCK,
        # One part a row: the parts of several would be added up in the compute dtype.
        k_splits=1,
        interpret=platform() != "gpu",
        # Divided here, in float32: the kernel would round the divisor.
        normalize_output=False,
        return_residuals=True,
    )
    # The largest weight is 1, so that only a row that reads nothing has less.
    found: Array = (sums.astype(jnp.float32) / jnp.maximum(totals, 1.0)[..., None]).astype(q.dtype)
    return found
