# SPDX-License-Identifier: Apache-2.0
"""Attention of whole rows by the splash kernel that ships with JAX, on TPUs.

No (Q, S) array is made, forward or backward, and blocks of scores above the diagonal or before the window are left
out. The kernel is told the segment of each token: padding is one of its own, on whichever side, and rows may be packed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jrl.mesh import constrain_rows, partition_spec, platform
from jrl.models.products import MIXED_VALUES

LANES = 128
"""The kernel's arrays have a multiple of so many tokens."""
BLOCKS = (512, 384, 256)
"""Queries, and keys, of a block; rows of up to `LANES` tokens have one block of that."""
PADDING = -1
"""Segment of padding."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=("segments", "is_unbroken"), meta_fields=())
@dataclass(frozen=True)
class SplashRows:
    """Facts of the rows that the kernel reads.

    Attributes:
      segments: A token reads those of its own segment; `PADDING` at padding.
      is_unbroken: False in a row whose real tokens have padding between them: there columns and positions differ, and a
        window, which the kernel measures in columns, would hide the wrong tokens.
    """

    segments: Int[Array, "B L"]
    is_unbroken: Bool[Array, "B"]


def splash_rows(
    attention_mask: Bool[Array, "B L"],
    positions: Int[Array, "B L"],
    segment_ids: Int[Array, "B L"] | None = None,
) -> SplashRows:
    """Rows as the kernel is told of them.

    Args:
      attention_mask: True on real tokens.
      positions: As `jrl.models.positions.token_positions` counts them.
      segment_ids: Of packed rows, none negative; None: each row is one segment.
    """
    segments = jnp.zeros(attention_mask.shape, jnp.int32) if segment_ids is None else segment_ids
    segments = constrain_rows(jnp.where(attention_mask, segments, PADDING))
    columns = jnp.arange(attention_mask.shape[1])[None, :]
    starts = jax.lax.cummax(jnp.where(attention_mask & (positions == 0), columns, 0), axis=1)
    return SplashRows(segments, (~attention_mask | (columns - starts == positions)).all(axis=1))


def attend_splash(
    q: Float[Array, "B L N H"],
    k: Float[Array, "B K L H"],
    v: Float[Array, "B K L H"],
    rows: SplashRows,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Float[Array, "B L N H"]:
    """Causal softmax attention inside of segments, N query heads over K key/value heads.

    What padding makes of padding is finite, and nothing reads it. Where this is no TPU the kernel is interpreted.

    Args:
      q: Queries.
      k: Keys, heads before positions.
      v: Values, likewise.
      rows: Their segments.
      scale: Multiplies the scores.
      window: Keys that a query reads, its own among them; None: all before it in its segment. A broken row becomes NaN.
      softcap: Scores s become softcap · tanh(s / softcap); None: not.
    """
    length = q.shape[1]
    window = None if window is None or window >= length else window
    block, padded = block_size(length)
    local = functools.partial(_attend, block=block, window=window, softcap=softcap)
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        # The partitioner cannot split a kernel: it would gather all rows on every device.
        by_heads, by_kv_heads = (
            partition_spec(mesh, ("batch", name, None, None), (x.shape[0], count, 1, 1))[0]
            for name, x, count in (("heads", q, q.shape[2]), ("kv_heads", k, k.shape[1]))
        )
        local = jax.shard_map(
            local,
            in_specs=(by_heads, by_kv_heads, by_kv_heads, PartitionSpec(by_heads[0])),
            out_specs=by_heads,
            check_vma=False,
        )

    def pad(x: Array, axis: int, value: int = 0) -> Array:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, padded - length)
        return jnp.pad(x, widths, constant_values=value)

    queries = (q * scale).astype(q.dtype).swapaxes(1, 2)
    out = local(pad(queries, 2), pad(k, 2), pad(v, 2), pad(rows.segments, 1, PADDING))
    out = out[:, :, :length].swapaxes(1, 2)
    return out if window is None else jnp.where(rows.is_unbroken[:, None, None, None], out, jnp.nan)


def block_size(length: int) -> tuple[int, int]:
    """(tokens of a block, tokens of a row padded to whole blocks): the least padding, then the largest blocks."""
    if length <= LANES:
        return LANES, LANES
    padded, block = min((-(-length // block) * block, -block) for block in BLOCKS)
    return -block, padded


def _attend(
    q: Float[Array, "B N S H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    segments: Int[Array, "B S"],
    *,
    block: int,
    window: int | None,
    softcap: float | None,
) -> Float[Array, "B N S H"]:
    """The kernel, on the rows and heads of one device."""
    # Imported late: Pallas and its compiler take a third of a second, and no CPU or GPU has use for them.
    from jax.experimental.pallas.ops.tpu import splash_attention as kernels

    num_heads, length = q.shape[1:3]
    # One pass makes the gradients of queries, keys and values where all keys are one block. With several, each would
    # leave its own part of the queries' gradient in memory.
    backward = (
        {"use_fused_bwd_kernel": True} if block == length else {"block_q_dq": block, "block_kv_dq": block}
    )
    kernel = kernels.make_splash_mha(
        _mask(num_heads, length, window),
        block_sizes=kernels.BlockSizes(
            block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block, **backward
        ),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=softcap,
        residual_checkpoint_name=MIXED_VALUES,
        interpret=platform() != "tpu",
    )
    one: Any = lambda q, k, v, own: kernel(q, k, v, segment_ids=kernels.SegmentIds(own, own))  # noqa: E731
    found: Array = jax.vmap(one)(q, k, v, segments)
    return found


@functools.cache
def _mask(num_heads: int, length: int, window: int | None) -> Any:
    """Which keys a query may read, but for segments. The same object each time: JAX traces the kernel once for it."""
    from jax.experimental.pallas.ops.tpu import splash_attention as masks

    shape = (length, length)
    mask = masks.CausalMask(shape) if window is None else masks.LocalMask(shape, (window - 1, 0), 0)
    return masks.MultiHeadMask([mask] * num_heads)
