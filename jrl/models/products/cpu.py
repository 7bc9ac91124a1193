# SPDX-License-Identifier: Apache-2.0
"""Forms of products that XLA's CPU compiler runs faster than the plain ones. They agree to rounding.

The compiler copies the right operand of a product into tiles before it multiplies, and reads the left one as it lies.
A product of many small matrices that adds up over their first axes it hands to a library, matrix by matrix.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jrl.models.products import plain
from jrl.models.products.trilinear import multiply

FEWEST_ROWS, MOST_ROWS = 4, 64
"""Rows between which a weight on the left is the faster form. GPT-2's table, two cores: 1.5 to 1.9 times at 4 to 32
rows, 1.1 times at 64; its kernels: 1.1 to 1.9 times."""
LEAST_SIZE = 2**19
"""Numbers in the least weight for which it is: smaller ones stay in the cache of a core."""
MOST_TOKENS = 32
"""Queries, and keys, up to which an operand of attention's gradients is turned first. 1,200 heads of 10 and 10, two
cores: 0.24 ms in place of 0.79; from 64 on there is nothing to gain."""


def multiply_table(rows: Float[Array, "*rows D"], table: Float[Array, "V D"]) -> Float[Array, "*rows V"]:
    """`plain.multiply_table`, with the table on the left for few rows, as a step of decoding has them."""
    if rows.ndim == 2 and FEWEST_ROWS <= len(rows) <= MOST_ROWS and table.size >= LEAST_SIZE:
        return table_first(rows, table)
    return plain.multiply_table(rows, table)


def table_first(rows: Float[Array, "B D"], table: Float[Array, "V D"]) -> Float[Array, "B V"]:
    """Products with the table on the left, where it is not copied: with few rows it is nearly all there is to read."""
    products = jnp.einsum("vd,bd->vb", table.astype(rows.dtype), rows, preferred_element_type=jnp.float32)
    # Without the barrier XLA would swap the operands, to be spared the transposition.
    return jax.lax.optimization_barrier(products).T


def score_keys(q: Float[Array, "B K M H"], k: Float[Array, "B K S H"]) -> Float[Array, "B K M S"]:
    """`plain.score_keys`, with another gradient of k where matrices are small."""
    if max(q.shape[2], k.shape[2]) > MOST_TOKENS:
        return plain.score_keys(q, k)
    return multiply(_ATTENTION, 2, q, k)


def mix_values(weights: Float[Array, "B K M S"], v: Float[Array, "B K S H"]) -> Float[Array, "B K M H"]:
    """`plain.mix_values`, with another gradient of v where matrices are small."""
    if max(weights.shape[2:]) > MOST_TOKENS:
        return plain.mix_values(weights, v)
    return multiply(_ATTENTION, 0, v, weights)


def _sum_over_queries(q: Float[Array, "B K M H"], scores: Float[Array, "B K M S"]) -> Float[Array, "B K S H"]:
    # Without the barrier XLA would make the transposition part of the product again.
    turned = jax.lax.optimization_barrier(scores.swapaxes(2, 3))
    return jnp.einsum("bksm,bkmh->bksh", turned, q, preferred_element_type=jnp.float32)


# Queries, keys and scores: the mix of values is the gradient of the scores by the queries.
_ATTENTION = (lambda k, scores: plain.mix_values(scores, k), _sum_over_queries, plain.score_keys)
