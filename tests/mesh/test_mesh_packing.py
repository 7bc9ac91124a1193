# SPDX-License-Identifier: Apache-2.0
"""Packed rows with noise on their embeddings, over eight devices and over one: the same step."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jrl.forward import Reader
from jrl.learners.sft import make_sft_update
from jrl.learners.state import init_train_state
from jrl.losses.sft import dft
from jrl.mesh import batch_sharding, tree_shardings
from jrl.models.noise import EmbeddingNoise
from jrl.ops.metrics import finalize
from tests.data.demonstrations.packed import packed_set, rows_of
from tests.learners.batches import CHUNK_BYTES, copied, sgd
from tests.tiny import tiny_lm

pytestmark = pytest.mark.mesh


def step(mesh: Mesh | None):
    """(parameters, metrics) after one step on sixteen packed rows, the last of which are copies."""
    lm, params = tiny_lm("llama")
    policy, optimizer = lm.policy(noise=EmbeddingNoise(5.0)), sgd(0.1)
    found = packed_set(rows_of(*range(3, 17), *range(3, 13)))
    numbers = np.arange(16)
    batch = found.batch_of(np.minimum(numbers, len(found) - 1), numbers < len(found))
    update = make_sft_update(
        Reader(policy, chunk_bytes=CHUNK_BYTES),
        optimizer,
        batch_size=16,
        minibatch_size=8,
        token_loss=dft,
        noise=True,
    )
    # Placing may share a buffer with what is placed, and donating deletes it for both.
    state = copied(init_train_state(params, optimizer))
    if mesh is None:
        state, metrics = jax.jit(update)(state, {}, batch, jax.random.key(0))
        return jax.device_get(state.params), finalize(metrics)
    state = jax.device_put(state, tree_shardings(mesh, state)[0])
    rows = jax.tree.map(lambda x: jax.device_put(x, batch_sharding(mesh)), batch)
    with jax.set_mesh(mesh):
        state, metrics = jax.jit(update, donate_argnums=0)(state, {}, rows, jax.random.key(0))
    return jax.device_get(state.params), finalize(metrics)


def test_lore_1_11_packed_rows_over_eight_devices(mesh: Mesh) -> None:
    params, metrics = step(None)
    sharded, sharded_metrics = step(mesh)
    assert sharded_metrics.keys() == metrics.keys()
    for name, value in metrics.items():
        assert sharded_metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    for got, expected in zip(jax.tree.leaves(sharded), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-6)
