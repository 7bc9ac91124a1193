# SPDX-License-Identifier: Apache-2.0
"""The products of a table with a few rows: the same in both forms, and which form is taken where."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models.layers import Table
from jrl.models.products import plain
from jrl.models.products.cpu import FEWEST_ROWS, LEAST_SIZE, MOST_ROWS, table_first

WIDTH = 256
LARGE = LEAST_SIZE // WIDTH


def case(rows: int, size: int, dtype: str = "float32") -> tuple[jax.Array, jax.Array]:
    draws = np.random.default_rng(rows + size)
    return tuple(jnp.asarray(draws.normal(size=(count, WIDTH)), dtype) for count in (rows, size))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_forms_are_the_products_of_all_pairs(dtype: str) -> None:
    rows, table = case(8, 48, dtype)
    wanted = np.asarray(rows, np.float64) @ np.asarray(table, np.float64).T
    for form in (plain.multiply_table, table_first):
        found = jax.jit(form)(rows, table)
        assert found.dtype == jnp.float32
        # Products of bfloat16 are exact in float32: only the order of the sum differs.
        np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_no_row_depends_on_its_neighbours() -> None:
    rows, table = case(8, LARGE)
    others = rows.at[:4].multiply(7.0)
    run = jax.jit(table_first)
    np.testing.assert_array_equal(run(rows, table)[4:], run(others, table)[4:])


@pytest.mark.parametrize(
    ("shape", "size", "first"),
    [
        ((FEWEST_ROWS,), LARGE, "table"),
        ((MOST_ROWS,), LARGE, "table"),
        ((FEWEST_ROWS - 1,), LARGE, "rows"),
        ((MOST_ROWS + 1,), LARGE, "rows"),
        ((8,), LARGE - 1, "rows"),
        ((4, 2), LARGE, "rows"),
    ],
)
def test_the_table_comes_first_for_a_few_rows_of_a_large_one(
    shape: tuple[int, ...], size: int, first: str
) -> None:
    """Read off the compiled program: the shape of what the product gives."""
    module = Table(size, WIDTH, 0.02, None)
    variables = {"params": {"embedding": jax.ShapeDtypeStruct((size, WIDTH), jnp.float32)}}
    hidden = jax.ShapeDtypeStruct((*shape, WIDTH), jnp.float32)
    run = jax.jit(lambda variables, x: module.apply(variables, x, jnp.float32, method="transposed"))
    products = re.findall(r"f32\[([\d,]+)\]\S* dot\(", run.lower(variables, hidden).compile().as_text())
    count = int(np.prod(shape))
    assert products == [f"{size},{count}" if first == "table" else f"{count},{size}"]
