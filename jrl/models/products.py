# SPDX-License-Identifier: Apache-2.0
"""Products of hidden states with kernels and tables, with gradients written by hand.

There is no forward mode (`jax.jvp`, `jax.jacfwd`) for what has one. In every gradient the axes of the rows are merged,
and the others stay as they are: each may be split over devices.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# Rows between which a weight on the left is the faster form on a CPU, and numbers in the least weight for which it is:
# smaller ones stay in the cache of a core. GPT-2's table, two cores: 1.5 to 1.9 times at 4 to 32 rows, 1.1 times at 64;
# its kernels: 1.1 to 1.9 times.
FEWEST_ROWS, MOST_ROWS = 4, 64
LEAST_SIZE = 2**19


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def contract(
    x: Float[Array, "*rows *inputs"], kernel: Float[Array, "*inputs *outputs"], num_inputs: int, dtype: Any
) -> Float[Array, "*rows *outputs"]:
    """x · W over the last `num_inputs` axes of x and the first of W, added up and returned in `dtype`.

    The gradient of W is computed as xᵀ·g. The derived one is (gᵀ·x)ᵀ, for which XLA's CPU compiler copies g transposed
    and, fused with that copy, adds up the residual stream's gradient anew from the last layer down: time quadratic in
    the number of layers. The axes of the rows are one there: of two, the copy of x transposed, with what made x fused
    into it, took longer than the product (GPT-2's `down`, 16 rows of 64: 40 ms, now 17).
    """
    start = x.ndim - num_inputs
    contracted = tuple(range(start, x.ndim)), tuple(range(num_inputs))
    return jax.lax.dot_general(x, kernel, (contracted, ((), ())), preferred_element_type=dtype)


def _contract_forward(
    x: Array, kernel: Array, num_inputs: int, dtype: Any
) -> tuple[Array, tuple[Array, Array]]:
    return contract(x, kernel, num_inputs, dtype), (x, kernel)


def _contract_backward(
    num_inputs: int, dtype: Any, kept: tuple[Array, Array], g: Array
) -> tuple[Array, Array]:
    x, kernel = kept
    start = x.ndim - num_inputs
    outputs = tuple(range(start, g.ndim)), tuple(range(num_inputs, kernel.ndim))
    x_rows, g_rows = _one_row_axis(x, start), _one_row_axis(g, start)
    return (
        _sum_over(g, kernel, outputs, dtype).astype(x.dtype),
        _sum_over(x_rows, g_rows, ((0,), (0,)), dtype).astype(kernel.dtype),
    )


contract.defvjp(_contract_forward, _contract_backward)


@jax.custom_vjp
def rows_first(rows: Float[Array, "*rows D"], table: Float[Array, "V D"]) -> Float[Array, "*rows V"]:
    """Products of all rows with all rows of a table, in float32: the form for accelerators, and for many rows.

    The gradient of the table is gᵀ·x. The derived one keeps two axes of rows, for which XLA's CPU compiler copies g
    transposed (GPT-2's head with its loss, 8 rows of 48: 527 ms a step, so 472).
    """
    return jnp.einsum("...d,vd->...v", rows, table, preferred_element_type=jnp.float32)


def _rows_first_forward(rows: Array, table: Array) -> tuple[Array, tuple[Array, Array]]:
    return rows_first(rows, table), (rows, table)


def _rows_first_backward(kept: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    rows, table = kept
    start = g.ndim - 1
    x_rows, g_rows = _one_row_axis(rows, start), _one_row_axis(g, start)
    return (
        _sum_over(g, table, ((start,), (0,)), jnp.float32).astype(rows.dtype),
        _sum_over(g_rows, x_rows, ((0,), (0,)), jnp.float32).astype(table.dtype),
    )


rows_first.defvjp(_rows_first_forward, _rows_first_backward)


def table_first(rows: Float[Array, "B D"], table: Float[Array, "V D"]) -> Float[Array, "B V"]:
    """The same for a few rows on a CPU, as a step of decoding has them.

    There XLA copies the right operand of a product into tiles before it multiplies, and reads the left one as it lies.
    With few rows, nearly all there is to read is the table: on the left it is not copied.
    """
    products = jnp.einsum("vd,bd->vb", table, rows, preferred_element_type=jnp.float32)
    # Without the barrier XLA would swap the operands, to be spared the transposition.
    return jax.lax.optimization_barrier(products).T


def _one_row_axis(x: Array, num_axes: int) -> Array:
    return x.reshape(math.prod(x.shape[:num_axes]), *x.shape[num_axes:])


def _sum_over(x: Array, y: Array, axes: tuple[tuple[int, ...], tuple[int, ...]], dtype: Any) -> Array:
    return jax.lax.dot_general(x, y, (axes, ((), ())), preferred_element_type=dtype)
