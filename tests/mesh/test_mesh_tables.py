# SPDX-License-Identifier: Apache-2.0
"""A lookup in a table that is split over `fsdp`: what is found moves, and so does its gradient, not the table."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jrl.mesh import batch_sharding, make_mesh
from jrl.models.layers import Table
from jrl.models.rounding import round_kernels
from tests.mesh.hlo import collectives

pytestmark = pytest.mark.mesh

SIZES = [(2, 2, 2), (1, 8, 1), (2, 4, 1)]
ROWS, LENGTH, NUM_ROWS, WIDTH = 8, 5, 64, 16
TABLE = Table(NUM_ROWS, WIDTH, 1.0, "vocab")


def loss(embedding: Any, ids: Any, weights: Any, *, is_whole: bool = False) -> Any:
    found = TABLE.apply({"params": {"embedding": embedding}}, ids, is_whole=is_whole)
    return jnp.sum(jnp.square(found) * weights)


def arguments(length: int) -> tuple[Any, Any, Any]:
    """(table, ids of which many come twice, a weight for each number that is found)."""
    numbers = np.random.default_rng(0)
    embedding = numbers.normal(size=(NUM_ROWS, WIDTH)).astype(np.float32)
    ids = numbers.integers(0, 7, size=(ROWS, length)).astype(np.int32)
    return embedding, ids, numbers.normal(size=(ROWS, length, WIDTH)).astype(np.float32)


def on_mesh(mesh: Any, given: tuple[Any, Any, Any]) -> tuple[Any, ...]:
    place = NamedSharding(mesh, jax.P("tensor", "fsdp"))
    rows = batch_sharding(mesh)
    return tuple(map(jax.device_put, given, (place, rows, rows)))


def compiled(sizes: tuple[int, int, int], length: int) -> tuple[Any, Any, Any]:
    """(the mesh, value and gradient as a program, its arguments)."""
    mesh = make_mesh(*sizes)
    given = on_mesh(mesh, arguments(length))
    with jax.set_mesh(mesh):
        jitted = jax.jit(jax.value_and_grad(loss), out_shardings=(None, given[0].sharding))
        return mesh, jitted.lower(*given).compile(), given


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("length", [LENGTH, 2 * NUM_ROWS], ids=["few ids", "more ids than rows"])
def test_value_and_gradient_are_those_of_one_device(sizes: tuple[int, int, int], length: int) -> None:
    def plain(embedding: Any, ids: Any, weights: Any) -> Any:
        return jnp.sum(jnp.square(embedding[ids]) * weights)

    value, gradient = jax.value_and_grad(plain)(*arguments(length))
    _, program, given = compiled(sizes, length)
    found, found_gradient = program(*given)
    np.testing.assert_allclose(found, value, rtol=1e-5)
    np.testing.assert_allclose(found_gradient, gradient, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_nothing_as_large_as_the_table_goes_over_fsdp(sizes: tuple[int, int, int]) -> None:
    """Its gradient is summed over `data`, each device's own columns."""
    mesh, program, _ = compiled(sizes, LENGTH)
    own = NUM_ROWS * WIDTH // (mesh.shape["fsdp"] * mesh.shape["tensor"])
    for one in collectives(program.as_text(), mesh):
        size = max(math.prod(shape) for shape in one.shapes)
        assert size <= own if one.axes == {"data"} else size <= ROWS // 2 * LENGTH * WIDTH // 2, one


def test_more_ids_than_rows_move_the_table() -> None:
    mesh, program, _ = compiled((1, 8, 1), 2 * NUM_ROWS)
    found = collectives(program.as_text(), mesh)
    assert any(one.kind == "all-gather" and (NUM_ROWS, WIDTH) in one.shapes for one in found)


def test_a_table_that_is_whole_sends_nothing() -> None:
    """As in a loop over tokens, where even little would be sent for each."""
    mesh = make_mesh(1, 8, 1)
    embedding, ids, _ = on_mesh(mesh, arguments(LENGTH))
    embedding = jax.device_put(embedding, NamedSharding(mesh, jax.P()))

    def look_up(embedding: Any, ids: Any) -> Any:
        return TABLE.apply({"params": {"embedding": embedding}}, ids, is_whole=True)

    with jax.set_mesh(mesh):
        program = jax.jit(look_up).lower(embedding, ids).compile()
    assert not collectives(program.as_text(), mesh)


def test_a_rounded_copy_is_read_where_there_is_one() -> None:
    mesh = make_mesh(1, 8, 1)
    embedding, ids, _ = on_mesh(mesh, arguments(LENGTH))

    def look_up(embedding: Any, ids: Any) -> Any:
        rounded = round_kernels({"embed": {"embedding": embedding}}, jnp.bfloat16)["embed"]
        return TABLE.apply({"params": rounded}, ids, jnp.bfloat16)

    with jax.set_mesh(mesh):
        found = jax.jit(look_up)(embedding, ids)
    np.testing.assert_array_equal(found, np.asarray(embedding)[np.asarray(ids)].astype(jnp.bfloat16))
