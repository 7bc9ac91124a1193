# SPDX-License-Identifier: Apache-2.0
"""A table of entries between tensor files and parameters: coverage, reading to the mesh, and writing.

It knows nothing of families, so language models, classifiers and adapters share it.

What reading costs. At any time the host holds the parameters that are already in their places, and of one parameter
(or of those that share a tensor in the file) the tensor as read and the part that is on its way to a device. The
largest come first, when little else is there yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import AbstractMesh, Mesh, SingleDeviceSharding

from jrl.mesh import path_name, tree_shardings
from jrl.models.families.base import Entry
from jrl.models.quantize import float32_paths
from jrl.models.safetensors_io import Tensors
from jrl.models.safetensors_write import LazyTensor
from jrl.typing import Params, PRNGKey

Index = tuple[slice, ...]
_ALIGNMENT = 64  # in bytes: memory that begins at a multiple of it is what a CPU device takes as it is


def parameter_targets(
    shapes: Params, *, dtype: Any, mesh: Mesh | AbstractMesh | None = None, float32: Sequence[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """Dtype and placement of every parameter, for `load_entries`.

    Args:
      shapes: The tree, of anything with a shape (`jax.eval_shape` of an initialiser).
      dtype: Of the parameters, but for those of `jrl.models.quantize.float32_paths`.
      mesh: Where they go; None: the default device.
      float32: Top-level entries of the tree that are float32 whatever `dtype` is (heads).
    Returns:
      The tree of `jax.ShapeDtypeStruct`, and a line for every dimension that the mesh does not divide.
    """
    places, replicated = (None, []) if mesh is None else tree_shardings(mesh, shapes)
    exact = float32_paths(flat_tree(shapes))

    def target(top: str, path: Any, leaf: Any, place: Any) -> jax.ShapeDtypeStruct:
        kind = jnp.float32 if top in float32 or f"{top}/{path_name(path)}" in exact else dtype
        return jax.ShapeDtypeStruct(leaf.shape, kind, sharding=place)  # type: ignore[no-untyped-call]

    return {
        name: jax.tree_util.tree_map_with_path(
            partial(target, name),
            dict(shapes[name]),
            jax.tree.map(lambda _: None, dict(shapes[name])) if places is None else places[name],
            is_leaf=lambda x: x is None,
        )
        for name in shapes
    }, replicated


def check_entries(
    files: Tensors,
    entries: Sequence[Entry],
    names: Mapping[str, str],
    *,
    is_ignored: Callable[[str], bool],
    what: str,
) -> None:
    """Every tensor of the table is found, in its shape and as numbers with a fraction, and every other is known.

    Args:
      files: The tensors.
      entries: The whole table.
      names: The table's name of each tensor → its name in the files.
      is_ignored: Whether a tensor that is not in the table may be passed over.
      what: "gpt2 model", for messages.
    Raises:
      ValueError: Naming file and tensor.
    """
    known = {entry.name for entry in entries}
    missing = sorted(known - set(names))
    if missing:
        count = "1 tensor is" if len(missing) == 1 else f"{len(missing)} tensors are"
        raise ValueError(
            f"{files.source}: {count} missing: {some(missing)}. Is the config that of these weights?"
        )
    unknown = sorted(name for name in names if name not in known and not is_ignored(name))
    if unknown:
        path = files.info[names[unknown[0]]].path
        count = "1 tensor has" if len(unknown) == 1 else f"{len(unknown)} tensors have"
        raise ValueError(
            f"{path}: {count} no place in a {what}: {some(unknown)}. Are they of another architecture or kind?"
        )
    for entry in entries:
        info = files.info[names[entry.name]]
        if info.shape != entry.shape:
            raise ValueError(
                f"{info.path}: {entry.name} must have shape {entry.shape} by its config, got {info.shape}. "
                "Does the config belong to these weights?"
            )
        if "float" not in info.dtype.name:
            raise ValueError(
                f"{info.path}: {entry.name} must hold floating-point numbers, got {info.dtype}. Is the checkpoint "
                "quantised? Load the full-precision weights."
            )


def load_entries(
    files: Tensors, entries: Iterable[Entry], like: Params, names: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Reads every parameter straight to its place.

    Args:
      files: The tensors, already checked (`check_entries`).
      entries: Cover every parameter of `like` exactly once.
      like: Tree of `jax.ShapeDtypeStruct`: shape, dtype, and sharding (None: the default device) of the result.
      names: The table's name of each tensor → its name in the files; None: they are the same.
    Raises:
      ValueError: Naming file and tensor, if one ends early or holds NaN or infinity.
    """
    targets = flat_tree(like)
    groups: dict[tuple[str, ...], list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.paths, []).append(entry)
    _check_groups(groups, {path: target.shape for path, target in targets.items()})
    params: dict[str, Any] = {}
    for paths in sorted(groups, key=lambda paths: -sum(_num_bytes(targets[path]) for path in paths)):
        buffers = {path: HostShards(targets[path]) for path in paths}
        for entry in groups[paths]:
            name = entry.name if names is None else names[entry.name]
            shapes = [targets[path].shape[0 if entry.index is None else 1 :] for path in paths]
            # No name for what was read: where the transform copies it, it is freed before the copy is placed.
            parts = entry.transform.load(files.read(name, targets[paths[0]].dtype), shapes)
            for path in paths:
                buffers[path].put(parts.pop(0), entry.index)
        for path in paths:
            params[path] = buffers[path].array()
    return dict(traverse_util.unflatten_dict(params, sep="/"))


def entry_tensors(entries: Iterable[Entry], params: Params, vocab_size: int) -> dict[str, LazyTensor]:
    """Tensors for `write_tensors`: each is fetched from its parameters when its turn comes.

    Args:
      entries: Cover every parameter exactly once.
      params: The tree, of arrays on any devices.
      vocab_size: Real entries of the vocabulary.
    """
    flat = flat_tree(params)

    def tensor(entry: Entry) -> LazyTensor:
        def make() -> np.ndarray:
            leaves = [flat[path] if entry.index is None else flat[path][entry.index] for path in entry.paths]
            return entry.transform.save([np.asarray(jax.device_get(leaf)) for leaf in leaves], vocab_size)

        return LazyTensor(np.dtype(flat[entry.paths[0]].dtype), entry.shape, make)

    return {entry.name: tensor(entry) for entry in entries}


def initial_shapes(init: Callable[[PRNGKey], Any]) -> Any:
    """Shapes of the parameters that `init` makes of a key.

    Not even the key is made: the devices of the mesh in force may be absent (`jrl plan --compile`).
    """
    return jax.eval_shape(lambda: init(jax.random.key(0)))


def flat_tree(tree: Params) -> dict[str, Any]:
    """A nested mapping as one of "a/b/c"."""
    return dict(traverse_util.flatten_dict(dict(tree), sep="/"))


def some(names: Sequence[str]) -> str:
    """The first of many names, for a message."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _check_groups(
    groups: Mapping[tuple[str, ...], Sequence[Entry]], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """The table covers every parameter once: as a whole, or each index of its first axis."""
    covered = [path for paths in groups for path in paths]
    assert sorted(covered) == sorted(shapes), set(covered) ^ set(shapes) or "a parameter is covered twice"
    for paths, entries in groups.items():
        found = [entry.index for entry in entries]
        whole = found == [None]
        assert whole or all(found == list(range(shapes[path][0])) for path in paths), (paths, found)


class HostShards:
    """A parameter that is being loaded: the parts that this host keeps until all its tensors were read.

    Args:
      target: Shape, dtype and sharding.
    """

    def __init__(self, target: jax.ShapeDtypeStruct):
        self._target = target
        sharding = target.sharding or SingleDeviceSharding(jnp.zeros(()).device)
        self._sharding = sharding
        self._indices: Any = sharding.addressable_devices_indices_map(target.shape)
        self._whole: np.ndarray | None = None
        self._stacked: dict[str, np.ndarray] = {}

    def put(self, part: np.ndarray, index: int | None) -> None:
        """Takes the whole parameter, or element `index` of it."""
        if index is None:
            assert part.shape == self._target.shape, (part.shape, self._target.shape)
            self._whole = part
            return
        for place in self._indices.values():
            start, stop, _ = place[0].indices(self._target.shape[0])
            if start <= index < stop:
                self._buffer(place)[index - start] = part[place[1:]]

    def array(self) -> jax.Array:
        """The parameter in its place; nothing of it stays behind on the host."""
        shards = []
        for device, place in self._indices.items():
            host = self._buffer(place) if self._whole is None else _unaligned_copy(self._whole[place])
            # Before the next one is made: copies run behind, and each would hold its source.
            shards.append(jax.device_put(host, device).block_until_ready())
            assert shards[-1].unsafe_buffer_pointer() != host.ctypes.data, (
                "a device took NumPy's memory as its own"
            )
        self._whole, self._stacked = None, {}
        return jax.make_array_from_single_device_arrays(self._target.shape, self._sharding, shards)

    def _buffer(self, place: Index) -> np.ndarray:
        """The stacked elements of one shard; devices with equal shards share it."""
        if str(place) not in self._stacked:
            shape = self._sharding.shard_shape(self._target.shape)
            self._stacked[str(place)] = _unaligned(shape, self._target.dtype)
        return self._stacked[str(place)]


def _unaligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An empty array that is copied onto every device.

    A CPU device takes NumPy's memory as it is where that happens to be aligned, `may_alias=False` or not, and lets go
    of it when it likes; this one begins an element behind an aligned address.
    """
    dtype = np.dtype(dtype)
    num_bytes = math.prod(shape) * dtype.itemsize
    room = np.empty(num_bytes + _ALIGNMENT + dtype.itemsize, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT + dtype.itemsize
    return room[start : start + num_bytes].view(dtype).reshape(shape)


def _unaligned_copy(part: np.ndarray) -> np.ndarray:
    """The array itself where no device can take its memory, else a copy."""
    if part.flags.c_contiguous and part.ctypes.data % _ALIGNMENT:
        return part
    copy = _unaligned(part.shape, part.dtype)
    copy[...] = part
    return copy


def _num_bytes(target: jax.ShapeDtypeStruct) -> int:
    return math.prod(target.shape) * np.dtype(target.dtype).itemsize
