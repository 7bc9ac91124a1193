# SPDX-License-Identifier: Apache-2.0
"""A small state and a way to save it, for the tests of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jrl.learners.state import TrainState, init_train_state
from jrl.trainers.checkpoints.checkpointer import Checkpointer

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
