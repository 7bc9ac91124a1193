# SPDX-License-Identifier: Apache-2.0
"""A checkpoint on eight devices: each gets its part, and no other."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from jrl.mesh import tree_shardings
from jrl.models.checkpoint import load_checkpoint, save_checkpoint
from jrl.models.entries_io import HostShards
from tests.tiny import tiny_lm

pytestmark = pytest.mark.mesh


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_every_device_gets_its_part_alone(mesh: jax.sharding.Mesh, family: str, tmp_path: Path) -> None:
    model, params = tiny_lm(family)
    save_checkpoint(tmp_path / "m", model, params)
    loaded = load_checkpoint(tmp_path / "m", mesh=mesh)
    wanted, replicated = tree_shardings(mesh, params)
    assert loaded.replicated == tuple(replicated)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, params)
    for leaf, sharding in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(wanted), strict=True):
        assert leaf.sharding == sharding
        assert {shard.data.shape for shard in leaf.addressable_shards} == {sharding.shard_shape(leaf.shape)}
    # And from there back to the disk.
    save_checkpoint(tmp_path / "again", model, loaded.params)
    again = (tmp_path / "again" / "model.safetensors").read_bytes()
    assert again == (tmp_path / "m" / "model.safetensors").read_bytes()


def test_aligned_memory_is_copied_to_each_device(mesh: jax.sharding.Mesh) -> None:
    """NumPy memory that a CPU device could take as it is, whole on every device: none may hold on to it."""
    room = np.zeros(16 * 32 + 16, np.float32)
    skipped = -room.ctypes.data % 64 // 4
    part = room[skipped : skipped + 16 * 32].reshape(16, 32)
    target = jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=jax.NamedSharding(mesh, jax.P()))
    shards = HostShards(target)
    with jax.set_mesh(mesh):
        shards.put(part, None)
        array = shards.array()
    part[:] = 1.0
    np.testing.assert_array_equal(array, 0.0)
