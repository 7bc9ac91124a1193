# SPDX-License-Identifier: Apache-2.0
"""A matrix product in which every group of rows has a matrix of its own, as a CPU runs it fastest.

XLA's CPU compiler makes of `jax.lax.ragged_dot` the product of all rows with all matrices. Here the rows are cut into
blocks that each belong to one group, and a loop multiplies block by block: it costs what the rows cost, twice that at
worst, however many matrices there are. `benchmarks/experts.py` measures both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jrl.models.products.trilinear import multiply

# Smaller blocks waste fewer rows at the end of a group, larger ones copy each matrix less often.
SMALLEST_BLOCK, LARGEST_BLOCK = 4, 64

Rows = Float[Array, "M K"]
Kernels = Float[Array, "E K N"]
Answers = Float[Array, "M N"]


def grouped_dot(rows: Rows, kernels: Kernels, sizes: Int[Array, "E"]) -> Answers:
    """`plain.grouped_dot` by blocks, its gradients too."""
    return multiply(_FORMS, 2, rows, kernels, sizes)


def blocked_dot(rows: Rows, kernels: Kernels, sizes: Int[Array, "E"], *, transposed: bool = False) -> Answers:
    """`grouped_dot` as a loop over blocks; `transposed` multiplies by the transposed matrices.

    A block that runs past the end of its group writes rows that are wrong, and the block after it, which begins there,
    writes them again: nothing needs to be moved apart. Past the last row lies room for one block.
    """
    blocks = _cut(rows.shape[0], sizes)
    padded = jnp.pad(rows, ((0, blocks.size), (0, 0)))

    def step(index: Array, out: Array) -> Array:
        block = jax.lax.dynamic_slice_in_dim(padded, blocks.start[index], blocks.size)
        kernel = jax.lax.dynamic_index_in_dim(kernels, blocks.group[index], keepdims=False)
        product = jax.lax.dot_general(
            block,
            kernel,
            (((1,), (1 if transposed else 0,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        return jax.lax.dynamic_update_slice_in_dim(out, product.astype(out.dtype), blocks.start[index], 0)

    width = kernels.shape[1 if transposed else 2]
    out = blocks.loop(step, jnp.zeros((padded.shape[0], width), rows.dtype))
    return out[: rows.shape[0]]


def blocked_sums(rows: Rows, answers: Answers, sizes: Int[Array, "E"]) -> Kernels:
    """Σ over the rows of each group of rowᵀ · answer, as a loop over blocks; they add up in float32."""
    blocks = _cut(rows.shape[0], sizes)
    pairs = [jnp.pad(part, ((0, blocks.size), (0, 0))) for part in (rows, answers)]

    def accumulate(index: Array, sums: Array) -> Array:
        own = blocks.own_rows(index)
        left, right = (
            jnp.where(own, jax.lax.dynamic_slice_in_dim(part, blocks.start[index], blocks.size), 0)
            for part in pairs
        )
        product = jax.lax.dot_general(
            left, right, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        return sums.at[blocks.group[index]].add(product)

    shape = (len(sizes), rows.shape[1], answers.shape[1])
    return blocks.loop(accumulate, jnp.zeros(shape, jnp.float32))


@dataclass(frozen=True)
class _Blocks:
    """Blocks of `size` rows in order; a group of n rows has ceil(n / size) of them.

    Attributes:
      size: Rows a block.
      start: First row of each block.
      group: Whose rows they are.
      stop: Where that group ends.
      number: How many blocks there are; the arrays are as long as the number can become.
    """

    size: int
    start: Int[Array, "blocks"]
    group: Int[Array, "blocks"]
    stop: Int[Array, "blocks"]
    number: Int[Array, ""]

    def own_rows(self, index: Array) -> Bool[Array, "size 1"]:
        """Mask of the rows of a block that belong to its group."""
        return (self.start[index] + jnp.arange(self.size) < self.stop[index])[:, None]

    def loop(self, step: Callable[[Array, Array], Array], carry: Array) -> Array:
        """Folds `step(index, carry)` over the blocks, skipping those that are not there this time."""

        def visit(index: Array, carry: Array) -> Array:
            return jax.lax.cond(index < self.number, step, lambda _, carry: carry, index, carry)

        # A static number of trips, so that what a program can cost at most is read off the compiled program.
        return jax.lax.fori_loop(0, len(self.start), visit, carry)


def _cut(num_rows: int, sizes: Int[Array, "E"]) -> _Blocks:
    num_groups = len(sizes)
    size = min(max(SMALLEST_BLOCK, 1 << (num_rows // (2 * num_groups)).bit_length()), LARGEST_BLOCK)
    # Most blocks arise where every group has one row, and one of them all the others.
    most = num_rows if num_rows <= num_groups else (num_rows - num_groups) // size + num_groups
    stops = jnp.cumsum(sizes)
    each = -(-sizes // size)
    last = jnp.cumsum(each)
    index = jnp.arange(most)
    group = jnp.minimum(jnp.searchsorted(last, index, side="right", method="compare_all"), num_groups - 1)
    start = (stops - sizes)[group] + (index - (last - each)[group]) * size
    return _Blocks(size, start, group, stops[group], last[-1])


_FORMS = (
    lambda kernels, answers, sizes: blocked_dot(answers, kernels, sizes, transposed=True),
    blocked_sums,
    blocked_dot,
)
