# SPDX-License-Identifier: Apache-2.0
"""A small state and a way to save it, for the tests of checkpoints and for the processes that they kill."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jrl.learners.state import TrainState, init_train_state
from jrl.trainers.checkpoint import Checkpointer

CONFIG = {"train": {"total_steps": 10, "seed": 1}, "method": {"name": "PPOConfig", "gamma": 1.0}}
FROZEN = "the frozen parameters' fingerprint"


def make_state(seed: int = 0, rows: int = 8) -> TrainState:
    """Two kernels (one bfloat16), their Adam moments, a step."""
    key = jax.random.key(seed)
    params = {
        "layers_0": {"kernel": jax.random.normal(key, (rows, 3))},
        "v_head": {"bias": jnp.arange(5, dtype=jnp.bfloat16)},
    }
    return init_train_state(params, optax.adamw(1e-3))


def write_model(directory: Path) -> None:
    """Stands for a Hugging Face export."""
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(bytes(range(256)))


def save(checkpoints: Checkpointer, step: int, state: Any = None, **changes: Any) -> None:
    """Saves with the arguments of every test but those given."""
    arguments = {
        "write_model": write_model,
        "config": CONFIG,
        "cursor": {"frozen_sha256": FROZEN, "iteration": step},
        "best_score": None,
    } | changes
    checkpoints.save(step, make_state(step) if state is None else state, **arguments)


def killed_while_saving(run_dir: str) -> None:
    """Saves step 1, starts to save step 2 and never ends."""

    def never_ends(directory: Path) -> None:
        write_model(directory)
        print("half-written", flush=True)
        time.sleep(600)

    checkpoints = Checkpointer(run_dir, keep=2)
    save(checkpoints, 1)
    save(checkpoints, 2, write_model=never_ends)
    time.sleep(600)


def save_on_a_full_disk(run_dir: str) -> None:
    """Saves step 1, then 2 under a limit on file sizes, then 3 without it; says what was kept each time."""
    import resource
    import warnings

    warnings.simplefilter("always")
    checkpoints = Checkpointer(run_dir, keep=2, notify=lambda text: print(text, flush=True))
    save(checkpoints, 1)
    checkpoints.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    save(checkpoints, 2, make_state(2, rows=20_000))
    checkpoints.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print("failed", checkpoints.failed_saves, flush=True)
    save(checkpoints, 3)
    checkpoints.close()


if __name__ == "__main__":
    {"kill": killed_while_saving, "full": save_on_a_full_disk}[sys.argv[1]](sys.argv[2])
