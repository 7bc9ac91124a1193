# SPDX-License-Identifier: Apache-2.0
"""Rows of a microbatch, which may lie on any device, come to those that compute them."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jrl.learners import accumulate
from jrl.learners.accumulate import take_rows
from jrl.mesh import batch_sharding, replicated
from jrl.trainers.plan.hlo import loops
from tests.mesh.hlo import collectives

pytestmark = pytest.mark.mesh

IDS = jnp.asarray([29, 3, 3, 17, 30, 0, 12, 31, 8, 9, 10, 11, 1, 22, 5, 14])
SHAPES = {
    "stream": (32, 12, 5),
    "keys": (32, 2, 12, 5),
    "few long columns": (32, 7, 64),
    "prime": (32, 61, 5),
    "empty": (32, 0, 5),
    "undivided": (33, 12, 5),
    "row": (32, 60),
    "number": (32,),
}


@pytest.fixture(autouse=True)
def few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulate, "SENT_BYTES", 16 * 12 * 5 * 4 // 3)


def test_rows_are_those_of_one_device_and_stay_spread(mesh: Mesh) -> None:
    key = jax.random.key(0)
    arrays = {name: np.asarray(jax.random.normal(key, shape)) for name, shape in SHAPES.items()}
    place = batch_sharding(mesh)
    placed = {name: x if len(x) % 32 else jax.device_put(x, place) for name, x in arrays.items()}
    with jax.set_mesh(mesh):
        found = jax.jit(take_rows)(placed, IDS)
    for name, taken in found.items():
        np.testing.assert_array_equal(taken, arrays[name][np.asarray(IDS)])
        assert not taken.size or taken.sharding.is_equivalent_to(place, taken.ndim)


def test_gradients_are_those_of_one_device(mesh: Mesh) -> None:
    x = np.asarray(jax.random.normal(jax.random.key(0), SHAPES["prime"]))
    weights = np.asarray(jax.random.normal(jax.random.key(1), (16, 61, 5)))
    with jax.set_mesh(mesh):
        found = jax.jit(jax.grad(lambda x: jnp.sum(weights * take_rows(x, IDS))))(x)
    np.testing.assert_allclose(found, jax.grad(lambda x: jnp.sum(weights * x[IDS]))(x), atol=1e-6)


@pytest.mark.parametrize(
    ("name", "rounds", "columns"),
    [("stream", 3, 4), ("keys", 6, 2), ("few long columns", 7, 1), ("prime", 16, 4), ("undivided", 0, 0)],
)
def test_no_device_makes_a_whole_microbatch_of_a_large_array(
    name: str, rounds: int, columns: int, mesh: Mesh
) -> None:
    place = batch_sharding(mesh) if name != "undivided" else replicated(mesh)
    shape = jax.ShapeDtypeStruct(SHAPES[name], jnp.float32, sharding=place)
    with jax.set_mesh(mesh):
        text = jax.jit(take_rows).lower(shape, IDS).compile().as_text() or ""
    found = collectives(text, mesh)
    if rounds == 0:
        assert not found and not loops(text)
        return
    (loop,) = {one.place for one in found}
    assert loop == (rounds,)
    column = 16 * 4 * math.prod(SHAPES[name][1:]) // SHAPES[name][-2]
    assert 0 < max(array.num_bytes for one in found for array in one.arrays) <= columns * column
