# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of several processes without a run: `saving_worker.py WHAT FOLDER`, where WHAT is a function below."""

from __future__ import annotations

import functools
import os
import resource
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jrl.distributed import join
from jrl.mesh import make_mesh
from jrl.placement import fetch
from jrl.trainers.checkpoints import checkpointer as checkpoint
from jrl.trainers.checkpoints import draft, run_folder
from jrl.trainers.checkpoints.checkpointer import Checkpointer, CheckpointError
from jrl.trainers.checkpoints.manifest import tree_sha256
from tests.trainers.checkpoints.saves import CONFIG, FROZEN, make_state, save


def placed_state(seed: int, rows: int = 8) -> Any:
    """The tests' state, split over all devices where its rows divide."""
    mesh = make_mesh(2, 2, 1)

    def place(leaf: Any) -> NamedSharding:
        axes = [("data", "fsdp")] if leaf.ndim == 2 else []
        return NamedSharding(mesh, PartitionSpec(*axes))

    make = functools.partial(make_state, rows=rows)
    shardings = jax.tree.map(place, jax.eval_shape(make, 0))
    return jax.jit(make, out_shardings=shardings)(seed)


def same(got: Any, seed: int) -> bool:
    """Whether a state is bit for bit that of a seed."""
    wanted = fetch(placed_state(seed))
    equal = jax.tree.map(np.array_equal, fetch(got), wanted)
    return all(jax.tree.leaves(equal))


def two(folder: Path) -> None:
    """Saves 1 and 2, whose state is donated as soon as `save` returns."""
    checkpoints = Checkpointer(folder, keep=2)
    checkpoints.take_over()
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0 - 1, tree), donate_argnums=0)
    for step in (1, 2):
        state = placed_state(step)
        save(checkpoints, step, state)
        jax.block_until_ready(overwrite(state))
    checkpoints.close()


def load(folder: Path) -> None:
    """Restores the newest, and says what it found."""
    checkpoints = Checkpointer(folder, keep=2, resume_from=folder)
    found = checkpoints.restore(placed_state(99), config=CONFIG, frozen_sha256=lambda: FROZEN)
    checkpoints.take_over()
    checkpoints.close()
    assert found is not None
    print(f"restored {found.step} {same(found.state, found.step)} {tree_sha256(found.state)}", flush=True)


def full(folder: Path) -> None:
    """Saves 1, then 2 while files of process 1 may not grow, then 3."""
    checkpoints = Checkpointer(folder, keep=2, notify=lambda text: print(text, flush=True))
    checkpoints.take_over()
    save(checkpoints, 1, placed_state(1))
    checkpoints.wait()
    if jax.process_index() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    save(checkpoints, 2, placed_state(2, rows=20_000))
    checkpoints.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print("failed", checkpoints.last_failed, flush=True)
    save(checkpoints, 3, placed_state(3))
    checkpoints.close()


def refused(folder: Path) -> None:
    """Starts afresh where checkpoints are."""
    try:
        Checkpointer(folder, keep=2)
    except (CheckpointError, RuntimeError) as error:
        print(f"refused: {error}", flush=True)


def elsewhere(folder: Path) -> None:
    """Process 1 sees another folder of that name, as on hosts that do not share it."""
    draft.LATE_SECONDS = 5
    if jax.process_index() == 1:
        another, see_sign = folder.with_name("another"), run_folder.see_sign
        another.mkdir()
        (another / "run.lock").write_text("of another job")
        checkpoint.see_sign = lambda run_dir, sign: see_sign(another, sign)
    try:
        Checkpointer(folder, keep=2)
    except RuntimeError as error:
        print(f"refused: {error}", flush=True)


def alone(folder: Path) -> None:
    """Process 1 fails, and the others, with whom it has worked, wait for it in the middle of their work."""
    del folder
    tree_sha256(placed_state(1))
    if jax.process_index() == 1:
        raise OSError("nobody else has this")
    tree_sha256(placed_state(1))
    os._exit(0)


if __name__ == "__main__":
    join()
    {function.__name__: function for function in (two, load, full, refused, elsewhere, alone)}[sys.argv[1]](
        Path(sys.argv[2])
    )
