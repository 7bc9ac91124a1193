# SPDX-License-Identifier: Apache-2.0
"""A state's arrays to the disk and back, through Orbax; and which failures are the disk's own."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jrl.trainers.manifest import CheckpointError


def fetch_state(state: Any) -> dict[str, Any]:
    """Host arrays of a state, by name: what is stored does not depend on the classes that held it.

    The state may be donated afterwards. On a CPU the result is a view, but one that holds a reference to its
    buffer, so that the runtime gives a later update new memory instead of overwriting what is still to be
    written.
    """
    arrays: dict[str, Any] = jax.device_get(_named_leaves(state))
    return arrays


def write_state(path: Path, arrays: Mapping[str, Any]) -> None:
    """Writes what `fetch_state` gave into a new folder; returns when it is complete."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, arrays)
        checkpointer.wait_until_finished()


def read_state(path: Path, like: Any) -> Any:
    """Reads a state back, each array onto the devices where its counterpart lies.

    Args:
      path: Folder that `write_state` wrote.
      like: The state's structure, of arrays or of `jax.ShapeDtypeStruct`s with shardings.
    Raises:
      CheckpointError: Naming the first array whose name, type or shape differs.
    """
    wanted = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)  # type: ignore[no-untyped-call]
        for name, leaf in _named_leaves(like).items()
    }
    with ocp.StandardCheckpointer() as checkpointer:
        stored = checkpointer.metadata(path).item_metadata.tree
        for name in sorted(wanted.keys() | stored.keys()):
            got, expected = _describe(stored.get(name)), _describe(wanted.get(name))
            if got != expected:
                raise CheckpointError(
                    f"`{name}` is {got} in {path}, but {expected} in this run. Was it another model or "
                    "optimizer, or another `num_layers_unfrozen`?"
                )
        arrays = checkpointer.restore(path, wanted)
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in wanted])


def disk_is_at_fault(error: BaseException) -> bool:
    """Whether a write failed because the disk is full or refuses, and not because of a mistake in the
    program.

    Tensorstore and safetensors wrap the system's error in types of their own, so its text has to be read.
    """
    numbers = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
    if isinstance(error, OSError) and error.errno in numbers:
        return True
    return any(os.strerror(number) in str(error) for number in numbers)


def _named_leaves(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _describe(leaf: Any) -> str:
    return "absent" if leaf is None else f"{leaf.dtype}{list(leaf.shape)}"
