# SPDX-License-Identifier: Apache-2.0
"""Reading a wide head a few positions at a time: logits or Q values of a whole window are never held at once.

A *read* turns the hidden states of some positions into what a loss needs of them: a number or two a position. What it
holds in between is as wide as the vocabulary, and that is what the chunks bound.

Reference: none; memory is bounded by recomputation (Chen et al. 2016, arXiv:1604.06174), results are unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jrl.ops.checks import check_positive

Result = TypeVar("Result")


def positions_of(chunk_bytes: int, *, vocab_size: int, num_reads: int = 1, num_parts: int = 1) -> int:
    """Positions of a chunk whose `num_reads` float32 arrays over the vocabulary fit into `chunk_bytes`; at least one.

    The bytes are those of one device. Counted over a whole mesh, chunks would become more with every device, and each
    gathers the head's kernel anew.

    Args:
      chunk_bytes: Most bytes of a chunk on a device.
      vocab_size: Width of an array.
      num_reads: Arrays that stand in memory together.
      num_parts: Parts into which a mesh splits an array over rows and vocabulary; see `jrl.mesh.logits_parts`.
    Returns:
      Positions over all devices, at least 1.
    Raises:
      ValueError: If an argument is not positive.
    Example:
      >>> positions_of(4000, vocab_size=100), positions_of(4000, vocab_size=100, num_reads=5)
      (10, 2)
    """
    check_positive("chunk_bytes", chunk_bytes)
    check_positive("vocab_size", vocab_size)
    check_positive("num_reads", num_reads)
    check_positive("num_parts", num_parts)
    return max(chunk_bytes * num_parts // (4 * vocab_size * num_reads), 1)


def map_positions(read: Callable[..., Result], arrays: tuple[Any, ...], *, positions: int) -> Result:
    """`read(*arrays)`, at once where it is small, else chunk by chunk and recomputed in the backward pass.

    Args:
      read: Treats every position alike: trees of (b, t, ...) to a tree of (b, t, ...). It may close over parameters,
        which are then constants of the loop, and whose gradients the loop adds up.
      arrays: Trees of (B, T, ...).
      positions: Most positions of B·T that one call of `read` gets, over all devices.
    Returns:
      A tree of (B, T, ...). Both ways agree to rounding.
    Example:
      >>> map_positions(lambda x: 2 * x, (jnp.array([[1.0, 2.0, 3.0]]),), positions=2).tolist()
      [[2.0, 4.0, 6.0]]
    """
    num_rows, width = jax.tree.leaves(arrays)[0].shape[:2]
    if num_rows * width <= positions:
        return read(*arrays)
    grid = _ChunkGrid.covering(num_rows, width, positions=positions)
    chunks = jax.lax.map(lambda chunk: jax.checkpoint(read)(*chunk), jax.tree.map(grid.split, arrays))
    joined: Result = jax.tree.map(grid.join, chunks)
    return joined


def chunk_shape(*, num_rows: int, width: int, positions: int) -> tuple[int, int]:
    """Sizes of the equal chunks into which `map_positions` cuts arrays (B, T, ...).

    Args:
      num_rows: B.
      width: T.
      positions: Most positions of B·T in a chunk.
    Returns:
      Rows and columns of a chunk.
    Example:
      >>> chunk_shape(num_rows=4, width=10, positions=32)
      (4, 5)
    """
    return _ChunkGrid.covering(num_rows, width, positions=positions).shape


class _ChunkGrid(NamedTuple):
    """Cuts (B T) into a grid of equal chunks, padded at the end.

    Time is cut first, and rows only where a single column is too large; a chunk then takes every n-th row. So
    each chunk holds rows of every device that shares the batch, and cutting moves no data between devices.
    """

    num_rows: int
    width: int
    row_chunks: int
    time_chunks: int

    @classmethod
    def covering(cls, num_rows: int, width: int, *, positions: int) -> _ChunkGrid:
        """The coarsest grid with at most `positions` of B·T in a chunk."""
        row_chunks = -(-num_rows // positions)
        rows = -(-num_rows // row_chunks)
        return cls(num_rows, width, row_chunks, time_chunks=-(-width // max(positions // rows, 1)))

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of a chunk."""
        return -(-self.num_rows // self.row_chunks), -(-self.width // self.time_chunks)

    def split(self, x: Array) -> Array:
        """(B T ...) to (chunk, rows of a chunk, columns of a chunk, ...)."""
        rows, columns = self.shape
        rest = x.shape[2:]
        overhang = (rows * self.row_chunks - self.num_rows, columns * self.time_chunks - self.width)
        x = jnp.pad(x, ((0, overhang[0]), (0, overhang[1]), *((0, 0) for _ in rest)))
        x = x.reshape(rows, self.row_chunks, self.time_chunks, columns, *rest)
        x = jnp.moveaxis(x, (1, 2), (0, 1))
        return x.reshape(self.row_chunks * self.time_chunks, rows, columns, *rest)

    def join(self, chunks: Array) -> Array:
        """Inverse of `split`: (chunk, rows, columns, ...) to (B T ...)."""
        _, rows, columns, *rest = chunks.shape
        x = chunks.reshape(self.row_chunks, self.time_chunks, rows, columns, *rest)
        x = jnp.moveaxis(x, (0, 1), (1, 2))
        x = x.reshape(rows * self.row_chunks, self.time_chunks * columns, *rest)
        return x[: self.num_rows, : self.width]
