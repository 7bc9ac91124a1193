# SPDX-License-Identifier: Apache-2.0
"""The gradients of products with kernels and tables."""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models.products.plain import contract, multiply_table
from jrl.ops.chunks import map_positions

# Rows, inputs and outputs of the four kinds of projection: MLP, queries, attention's output, a single vector.
SHAPES = [((2, 3), (4,), (5,)), ((2, 3), (4,), (2, 3)), ((2, 3), (2, 4), (5,)), ((), (4,), (5,))]


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_gradients_are_the_derived_ones(
    rows: tuple[int, ...], inputs: tuple[int, ...], outputs: tuple[int, ...]
) -> None:
    x_key, kernel_key, g_key = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(x_key, (*rows, *inputs))
    kernel = jax.random.normal(kernel_key, (*inputs, *outputs))
    g = jax.random.normal(g_key, (*rows, *outputs))

    def derived(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jnp.tensordot(x, kernel, len(inputs))

    y, gradients = jax.vjp(lambda x, kernel: contract(x, kernel, len(inputs), jnp.float32), x, kernel)
    expected_y, expected = jax.vjp(derived, x, kernel)
    for got, wanted in zip((y, *gradients(g)), (expected_y, *expected(g)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["kernel", "heads", "table"])
def test_the_gradient_of_a_weight_is_one_product_over_one_axis_of_rows(name: str) -> None:
    """Read off the compiled program: no operand is transposed first, however many axes the rows have."""
    product = multiply_table if name == "table" else lambda x, w: contract(x, w, 1, jnp.float32)
    shape = {"kernel": (64, 80), "heads": (64, 5, 16), "table": (80, 64)}[name]
    operands = [jax.ShapeDtypeStruct(part, jnp.float32) for part in ((16, 32, 64), shape)]
    gradient = jax.jit(jax.grad(lambda x, w: jnp.sin(product(x, w)).sum(), 1))
    program = gradient.lower(*operands).compile().as_text()
    width = f"{shape[0]},{math.prod(shape[1:])}"
    products = re.findall(
        rf"f32\[{width}\]\S* dot\(.*?lhs_contracting_dims={{(.*?)}}.*?rhs_\w+={{(.*?)}}", program
    )
    assert products == [("0", "0")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [(), (6,), (2, 3)])
def test_gradients_of_a_table_are_the_derived_ones(rows: tuple[int, ...], dtype: str) -> None:
    x_key, table_key, g_key = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(x_key, (*rows, 4)).astype(dtype)
    table = jax.random.normal(table_key, (5, 4)).astype(dtype)
    g = jax.random.normal(g_key, (*rows, 5))

    def derived(x: jax.Array, table: jax.Array) -> jax.Array:
        return jnp.einsum("...d,vd->...v", x, table, preferred_element_type=jnp.float32)

    y, gradients = jax.vjp(multiply_table, x, table)
    expected_y, expected = jax.vjp(derived, x, table)
    for got, wanted in zip((y, *gradients(g)), (expected_y, *expected(g)), strict=True):
        assert got.dtype == wanted.dtype and got.shape == wanted.shape
        tolerance = (
            1e-5 if dtype == "float32" else 2.0**-7
        )  # an ulp of bfloat16, whose sums differ in their order
        np.testing.assert_allclose(
            *(np.float32(part) for part in (got, wanted)), rtol=tolerance, atol=tolerance
        )


def test_a_head_in_bfloat16_adds_up_in_float32() -> None:
    x, kernel = jnp.ones((2, 3, 4), jnp.bfloat16), jnp.full((4, 5), 1 + 2.0**-7, jnp.bfloat16)
    y, gradients = jax.vjp(lambda *operands: contract(*operands, 1, jnp.float32), x, kernel)
    assert y.dtype == jnp.float32 and [g.dtype for g in gradients(y)] == [jnp.bfloat16] * 2
    np.testing.assert_array_equal(y, np.full((2, 3, 5), 4 + 2.0**-5, np.float32))


def test_pieces_of_a_table_gradient_are_added_up_in_float32() -> None:
    """Each piece alone rounded to bfloat16 would be off by 2^-9 of it."""
    draws = np.random.default_rng(0)
    rows = jnp.asarray(draws.normal(size=(1, 64, 8)), jnp.bfloat16)
    g = jnp.asarray(draws.normal(size=(1, 64, 5)), jnp.bfloat16).astype(jnp.float32)
    table = jnp.asarray(draws.normal(size=(5, 8)), jnp.float32)

    def read(table: jax.Array) -> jax.Array:
        def piece(rows: jax.Array, g: jax.Array) -> jax.Array:
            return (multiply_table(rows, table) * g).sum(axis=-1)

        return map_positions(piece, (rows, g), positions=8).sum()

    found = jax.jit(jax.grad(read))(table)
    wanted = np.einsum("btv,btd->vd", np.asarray(g, np.float64), np.asarray(rows, np.float64))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_forward_mode_of_a_table_in_float32_under_bfloat16() -> None:
    draws = np.random.default_rng(1)
    rows = jnp.asarray(draws.normal(size=(3, 8)), jnp.bfloat16)
    table, change = (jnp.asarray(draws.normal(size=(5, 8)), jnp.float32) for _ in range(2))
    _, found = jax.jvp(lambda table: multiply_table(rows, table), (table,), (change,))
    np.testing.assert_allclose(found, plain_product(rows, change), rtol=1e-5, atol=1e-5)


def plain_product(rows: jax.Array, table: jax.Array) -> np.ndarray:
    """Products of numbers in bfloat16, exactly."""
    return np.asarray(rows, np.float64) @ np.asarray(table.astype(jnp.bfloat16), np.float64).T
