# SPDX-License-Identifier: Apache-2.0
"""A product per group of rows: the same by blocks, by ragged_dot and by definition; and what it costs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models.products import PLAIN
from jrl.models.products.blocks import blocked_dot, grouped_dot

ragged_dot = PLAIN.grouped_dot

# Group sizes: uneven with empty groups, one group only, more groups than rows, and groups of several blocks each.
SIZES = {
    "uneven": [3, 0, 9, 1, 0, 0, 7, 0],
    "one group": [0, 0, 40, 0],
    "few rows": [0, 1, 0, 0, 0, 2, 0, 0, 0, 0],
    "no rows but one": [1, 0],
    "long": [200, 70, 0, 130],
    "as many blocks as can be": [1, 129, 1],  # of 32 rows: 1 + 5 + 1
}


def case(sizes, dtype=jnp.float32):
    """Random rows and matrices, 6 by 10, for these group sizes."""
    keys = jax.random.split(jax.random.key(len(sizes)), 2)
    rows = jax.random.normal(keys[0], (sum(sizes), 6), dtype)
    return rows, jax.random.normal(keys[1], (len(sizes), 6, 10), dtype), jnp.asarray(sizes)


def by_definition(rows, kernels, sizes):
    """Every row times the matrix of its group, one by one."""
    groups = np.repeat(np.arange(len(sizes)), np.asarray(sizes))
    return jnp.einsum("mk,mkn->mn", rows, kernels[groups])


@pytest.mark.parametrize("form", [blocked_dot, ragged_dot, grouped_dot])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_every_row_meets_the_matrix_of_its_group(form, sizes):
    rows, kernels, counts = case(sizes)
    actual = jax.jit(form)(rows, kernels, counts)
    np.testing.assert_allclose(actual, by_definition(rows, kernels, sizes), atol=1e-5)


@pytest.mark.parametrize("form", [grouped_dot, ragged_dot])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_gradients_are_those_of_the_definition(form, sizes):
    rows, kernels, counts = case(sizes)
    cotangent = jax.random.normal(jax.random.key(7), (len(rows), 10))
    _, pullback = jax.vjp(lambda rows, kernels: by_definition(rows, kernels, sizes), rows, kernels)
    actual = jax.jit(lambda *given: jax.vjp(form, *given, counts)[1](cotangent)[:2])(rows, kernels)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), actual, pullback(cotangent))


def test_a_row_that_is_not_finite_spoils_no_other():
    rows, kernels, counts = case(SIZES["uneven"])
    spoiled = rows.at[4].set(jnp.nan)
    actual, wanted = (np.array(jax.jit(grouped_dot)(x, kernels, counts)) for x in (spoiled, rows))
    assert np.isnan(actual[4]).all()
    np.testing.assert_array_equal(np.delete(actual, 4, 0), np.delete(wanted, 4, 0))
    gradient = jax.jit(jax.grad(lambda k: grouped_dot(spoiled, k, counts).sum()))(kernels)
    assert np.isnan(gradient[2]).all() and not np.isnan(np.delete(gradient, 2, 0)).any()


def test_low_precision_accumulates_in_float32():
    # 1024 ones: added up in bfloat16, whose integers end at 256, the sum would get no further.
    rows, kernels = jnp.ones((3, 1024), jnp.bfloat16), jnp.ones((2, 1024, 4), jnp.bfloat16)
    out = jax.jit(grouped_dot)(rows, kernels, jnp.array([1, 2]))
    assert out.dtype == jnp.bfloat16 and (out == 1024).all()
    # A gradient of 512 blocks, each 64 · 0.5 = 32: from 8192 on, bfloat16 has steps of 64.
    rows, kernels = jnp.full((32768, 1), 0.5, jnp.bfloat16), jnp.ones((1, 1, 1), jnp.bfloat16)
    summed = jax.jit(jax.grad(lambda k: grouped_dot(rows, k, jnp.array([32768])).astype(jnp.float32).sum()))
    assert summed(kernels).item() == 16384


def cost(function, *arguments):
    """At most so many FLOPs: XLA counts the body of a loop once, and the compiled program states the trips."""
    compiled = jax.jit(function).lower(*arguments).compile()
    text = compiled.as_text()
    trips = [int(n) for n in re.findall(r'known_trip_count":\{"n":"(\d+)"', text)]
    assert len(trips) == len(re.findall(r" while\(", text)), "a loop of unknown length"
    return compiled.cost_analysis()["flops"] * max(trips, default=1)


def products(form, num_groups):
    rows, kernels = jnp.zeros((512, 64)), jnp.zeros((num_groups, 64, 128))
    return cost(form, rows, kernels, jnp.full((num_groups,), 512 // num_groups))


ONE_PRODUCT = 2 * 512 * 64 * 128


def test_the_cost_does_not_grow_with_the_groups():
    """Read off the compiled program, for the worst group sizes: the last block of each group may be half empty."""
    costs = {num_groups: products(grouped_dot, num_groups) for num_groups in (8, 16, 32)}
    assert all(ONE_PRODUCT <= found < 2.1 * ONE_PRODUCT for found in costs.values()), costs
    assert costs[16] < 1.1 * costs[8] and costs[32] < 1.1 * costs[16], costs


def test_ragged_dot_on_a_cpu_multiplies_every_row_with_every_matrix():
    """Why there are blocks: should this fail, XLA has learnt better, and they may go."""
    costs = {num_groups: products(ragged_dot, num_groups) for num_groups in (8, 16)}
    assert costs[8] > 8 * ONE_PRODUCT and costs[16] > 1.9 * costs[8], costs


def test_gradients_cost_two_products():
    def gradients(num_groups):
        rows, kernels = jnp.zeros((512, 64)), jnp.zeros((num_groups, 64, 128))
        sizes, cotangent = jnp.full((num_groups,), 512 // num_groups), jnp.zeros((512, 128))
        return cost(lambda *xs: jax.vjp(grouped_dot, *xs[:3])[1](xs[3])[:2], rows, kernels, sizes, cotangent)

    costs = {num_groups: gradients(num_groups) for num_groups in (8, 16)}
    assert all(2 * ONE_PRODUCT <= found < 4.3 * ONE_PRODUCT for found in costs.values()), costs
