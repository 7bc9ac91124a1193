# SPDX-License-Identifier: Apache-2.0
"""Between the host's NumPy arrays and arrays over the devices of all processes."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jrl.mesh import batch_sharding, replicated, rows_parts


def rows_sharding(mesh: Mesh, num_rows: int) -> NamedSharding:
    """Rows split over the data and fsdp axes where they divide, else whole on every device."""
    return batch_sharding(mesh) if num_rows % rows_parts(mesh) == 0 else replicated(mesh)


def place(tree: Any, shardings: Any) -> Any:
    """Host arrays as global arrays. Every process passes the same values and copies only its own devices' part.

    Args:
      tree: NumPy arrays, whole.
      shardings: One for all, or a tree of them.
    """

    def put(leaf: Any, sharding: NamedSharding) -> jax.Array:
        leaf = np.asarray(leaf)
        if sharding.is_fully_addressable:
            return jax.device_put(leaf, sharding)
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

    if isinstance(shardings, NamedSharding):
        return jax.tree.map(lambda leaf: put(leaf, shardings), tree)
    return jax.tree.map(put, tree, shardings)


def place_rows(mesh: Mesh, tree: Any) -> Any:
    """Host arrays with leading rows onto the mesh: split where the rows divide, whole on every device where not."""
    return jax.tree.map(lambda leaf: place(leaf, rows_sharding(mesh, leaf.shape[0])), tree)


def own_rows(mesh: Mesh, num_rows: int) -> np.ndarray:
    """Rows of a batch that this process answers for on the host, ascending: each row is one process's.

    They lie on this process's devices where `rows_sharding` put them. A row that lies on devices of several processes
    (its model is split over them, or the rows do not divide) belongs to one of these, in turn.
    """
    holders: dict[tuple[int, int], set[int]] = {}
    spans: Any = rows_sharding(mesh, num_rows).devices_indices_map((num_rows,))
    for device, index in spans.items():
        start, stop, _ = index[0].indices(num_rows)
        holders.setdefault((start, stop), set()).add(device.process_index)
    own = [
        np.arange(*span)
        for number, (span, processes) in enumerate(sorted(holders.items()))
        if sorted(processes)[number % len(processes)] == jax.process_index()
    ]
    return np.concatenate([np.zeros(0, np.int64), *own])


def local_rows(x: jax.Array, rows: np.ndarray) -> np.ndarray:
    """These rows of a global array, on the host; they must lie on devices of this process, as `own_rows` do."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)[rows]
    found = np.zeros(x.shape, x.dtype)
    for shard in x.addressable_shards:
        found[shard.index] = np.asarray(shard.data)
    return found[rows]


def fetch(tree: Any, *, everywhere: bool = True) -> Any:
    """Global arrays on the host, whole: leaf by leaf, so that no device ever holds more than one of them.

    All processes must call it.

    Args:
      tree: Of arrays.
      everywhere: Whether all processes want them; else None stands for every leaf on all but process 0.
    """

    def get(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            sharding: Any = leaf.sharding
            leaf = jax.jit(lambda x: x, out_shardings=replicated(sharding.mesh))(leaf)
        return np.asarray(leaf) if everywhere or jax.process_index() == 0 else None

    return jax.tree.map(get, tree)
