# SPDX-License-Identifier: Apache-2.0
"""Between the host's NumPy arrays and arrays over the devices of all processes."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrl.distributed import gather, meet, new_meeting
from jrl.mesh import batch_sharding, place, replicated, rows_parts


class Dispatch:
    """Lets one thread at a time send programs to the devices; to be entered again by the thread that is in it.

    Programs that reach over devices wait for each other there, so that each device must get them in the same order.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        """Waits for the other threads."""
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        """Lets the others go on, once the thread has left as often as it has entered."""
        self._lock.release()

    @contextlib.contextmanager
    def left(self) -> Iterator[None]:
        """Inside, this thread waits for something else, and others may send programs; it has entered once."""
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()


DISPATCH = Dispatch()
"""Of this process."""


def rows_sharding(mesh: Mesh, num_rows: int) -> NamedSharding:
    """Rows split over the data and fsdp axes where they divide, else whole on every device."""
    return batch_sharding(mesh) if num_rows % rows_parts(mesh) == 0 else replicated(mesh)


def place_rows(mesh: Mesh, tree: Any) -> Any:
    """Host arrays with leading rows onto the mesh: split where the rows divide, whole on every device where not."""
    return jax.tree.map(lambda leaf: place(leaf, rows_sharding(mesh, leaf.shape[0])), tree)


def own_rows(mesh: Mesh, num_rows: int) -> np.ndarray:
    """Rows of a batch that this process answers for on the host, ascending: each row is one process's.

    They lie on this process's devices where `rows_sharding` put them. Rows that lie on devices of several processes
    (the model is split over these, or the rows do not divide) are shared out among them.
    """
    holders: dict[tuple[int, int], set[int]] = {}
    here = jax.process_index()
    spans: Any = rows_sharding(mesh, num_rows).devices_indices_map((num_rows,))
    for device, index in spans.items():
        start, stop, _ = index[0].indices(num_rows)
        holders.setdefault((start, stop), set()).add(device.process_index)
    own = [np.zeros(0, np.int64)]
    for span, processes in sorted(holders.items()):
        shares = np.array_split(np.arange(*span), len(processes))
        own += [rows for rows, process in zip(shares, sorted(processes), strict=True) if process == here]
    return np.concatenate(own)


def local_rows(x: jax.Array, rows: np.ndarray) -> np.ndarray:
    """Fetches rows of a global array to the host; they must lie on devices of this process, as `own_rows` do."""
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
            leaf = _gathering(sharding.mesh)(leaf)
        if everywhere or jax.process_index() == 0:
            return np.asarray(leaf)
        jax.block_until_ready(leaf)  # else the next would be made whole beside this one
        return None

    return jax.tree.map(get, tree)


def local_computation() -> contextlib.AbstractContextManager[Any]:
    """Context in which one of several processes calls a function of the user's on rows of its own.

    With the run's mesh in force, the JAX in it would be a program over the devices of all processes, each of which
    gives it other rows. Inside, it runs on this process's first device unless it says where. One process keeps its
    mesh.
    """
    return contextlib.nullcontext() if jax.process_count() == 1 else jax.set_mesh(None)


def introduce(mesh: Mesh) -> None:
    """Lets all devices talk that will have to, along every axis and all of them together: right after the start.

    A network that does not work shows here, before a model is loaded. And who talks for the first time waits only so
    long for the others (gloo: 30 s), which are together now and may not be later, when each compiles for itself.
    """
    if jax.process_count() == 1:
        return
    meet(new_meeting())
    gather()
    axes = [axis for axis, size in enumerate(mesh.devices.shape) if size > 1]
    groups = [group for count in range(1, len(axes) + 1) for group in itertools.combinations(axes, count)]
    names = mesh.axis_names
    left = [
        PartitionSpec(*(name for axis, name in enumerate(names) if axis not in group)) for group in groups
    ]
    sums = jax.jit(
        lambda x: [x.sum(axis=group) for group in groups],
        out_shardings=[NamedSharding(mesh, spec) for spec in left],
    )
    ones: Any = np.ones(mesh.devices.shape, np.float32)
    jax.block_until_ready(sums(place(ones, NamedSharding(mesh, PartitionSpec(*names)))))


@functools.cache
def _gathering(mesh: Mesh) -> Any:
    """A program that puts an array whole on every device; one a mesh, so that it is compiled once for each shape."""
    return jax.jit(lambda x: x, out_shardings=replicated(mesh))
