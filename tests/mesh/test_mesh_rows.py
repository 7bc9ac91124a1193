# SPDX-License-Identifier: Apache-2.0
"""Rows of a microbatch, which may lie on any device, come to those that compute them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jrl.learners import accumulate
from jrl.learners.accumulate import take_rows
from jrl.mesh import batch_sharding
from tests.mesh.hlo import collectives

pytestmark = pytest.mark.mesh

IDS = jnp.asarray([29, 3, 3, 17, 30, 0, 12, 31, 8, 9, 10, 11, 1, 22, 5, 14])
SHAPES = {"stream": (32, 12, 5), "keys": (32, 2, 12, 5), "odd": (32, 7, 64), "row": (32, 60), "number": (32,)}
BYTES = 16 * 12 * 5 * 4 // 3  # a third of the microbatch's stream


@pytest.fixture(autouse=True)
def few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulate, "SENT_BYTES", BYTES)


def test_rows_are_those_of_one_device_and_stay_spread(mesh: Mesh) -> None:
    key = jax.random.key(0)
    arrays = {name: np.asarray(jax.random.normal(key, shape)) for name, shape in SHAPES.items()}
    place = batch_sharding(mesh)
    with jax.set_mesh(mesh):
        found = jax.jit(take_rows)(jax.device_put(arrays, place), IDS)
    for name, taken in found.items():
        np.testing.assert_array_equal(taken, arrays[name][np.asarray(IDS)])
        assert taken.sharding.is_equivalent_to(place, taken.ndim)


def test_no_device_makes_a_whole_microbatch_of_a_large_array(mesh: Mesh) -> None:
    place = batch_sharding(mesh)
    shapes = {
        name: jax.ShapeDtypeStruct(SHAPES[name], jnp.float32, sharding=place)
        for name in ("stream", "keys", "odd")
    }
    with jax.set_mesh(mesh):
        text = jax.jit(take_rows).lower(shapes, IDS).compile().as_text()
    one_column = 16 * 64 * 4  # of "odd": more than a piece may be
    largest = max(array.num_bytes for one in collectives(text or "", mesh) for array in one.arrays)
    assert 0 < largest <= max(BYTES, one_column)
