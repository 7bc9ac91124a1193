# SPDX-License-Identifier: Apache-2.0
"""A state's arrays to the disk and back, through Orbax; and which failures are the disk's own.

Orbax is imported where it is used: it takes a tenth of what `import jrl` does, and most scripts save nothing at once.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from jrl.trainers.checkpoints.manifest import CheckpointError


def fetch_state(state: Any) -> dict[str, Any]:
    """Arrays of a state, by name: what is stored does not depend on the classes that held it.

    Those that this process holds whole come to the host, and may be donated afterwards. On a CPU the result is a view,
    but one that holds a reference to its buffer, so that the runtime gives a later update new memory instead of
    overwriting what is still to be written. Those of several processes stay where they are until `start_write`.
    """
    return {
        name: jax.device_get(leaf) if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable else leaf
        for name, leaf in _named_leaves(state).items()
    }


def start_write(path: Path, arrays: Mapping[str, Any]) -> Callable[[], None]:
    """Brings to the host what this process has to write; afterwards all may be donated. All processes call it.

    Not in a thread that has an event loop, as a notebook's main thread does. Orbax writes each shard once, wherever it
    has copies, and what is on the host already from process 0.

    Args:
      path: An empty folder, the same one for all.
      arrays: What `fetch_state` gave.
    Returns:
      What writes it: the slow part, on whatever thread. When all processes have done so, `finish_write` is due.
    """
    import orbax.checkpoint as ocp
    from etils import epath

    handler = ocp.StandardCheckpointHandler()

    def begin() -> list[Any]:
        saving = handler.async_save(epath.Path(path), args=ocp.args.StandardSave(dict(arrays)))
        return asyncio.run(saving) or []

    on_devices = any(isinstance(leaf, jax.Array) for leaf in arrays.values())
    # What is on the host already, Orbax would copy once more at its beginning: that is left to the slow part.
    begun = begin() if on_devices else None

    def write() -> None:
        for future in begin() if begun is None else begun:
            future.result()

    return write


def finish_write(path: Path) -> None:
    """Joins what the processes wrote to one state; process 0 does it, after all of them."""
    import orbax.checkpoint as ocp
    from etils import epath

    ocp.StandardCheckpointHandler().finalize(epath.Path(path))


def own_files(path: Path) -> list[Path]:
    """Files of a state that this process alone wrote, as far as Orbax's names tell; process 0 answers for the rest."""
    number = jax.process_index()
    found = (path / f"ocdbt.process_{number}").rglob("*")
    return sorted(file for file in (*found, path / "array_metadatas" / f"process_{number}") if file.is_file())


def read_state(path: Path, like: Any) -> Any:
    """Reads a state back, each array onto the devices where its counterpart lies. All processes call it.

    Args:
      path: Folder of a state that was written by any number of processes, on whatever mesh.
      like: The state's structure, of arrays or of `jax.ShapeDtypeStruct`s with shardings.
    Raises:
      CheckpointError: Naming the first array whose name, type or shape differs.
    """
    import orbax.checkpoint as ocp
    from etils import epath

    wanted = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)  # type: ignore[no-untyped-call]
        for name, leaf in _named_leaves(like).items()
    }
    handler, folder = ocp.StandardCheckpointHandler(), epath.Path(path)
    stored = handler.metadata(folder).tree
    for name in sorted(wanted.keys() | stored.keys()):
        got, expected = _describe(stored.get(name)), _describe(wanted.get(name))
        if got != expected:
            raise CheckpointError(
                f"`{name}` is {got} in {path}, but {expected} in this run. Was it another model or "
                "optimizer, or another `num_layers_unfrozen`?"
            )
    arrays = handler.restore(folder, args=ocp.args.StandardRestore(wanted))
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in wanted])


def disk_is_at_fault(error: BaseException) -> bool:
    """True where a write failed because the disk is full or refuses, and not because of a mistake in the
    program.

    Tensorstore and safetensors wrap the system's error in types of their own, so its text has to be read.
    """
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    numbers = (*full, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.ESTALE, errno.ETIMEDOUT)
    if isinstance(error, OSError) and error.errno in numbers:
        return True
    return any(os.strerror(number) in str(error) for number in numbers)


def _named_leaves(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _describe(leaf: Any) -> str:
    return "absent" if leaf is None else f"{leaf.dtype}{list(leaf.shape)}"
