# SPDX-License-Identifier: Apache-2.0
"""On the same pairs, one device and eight compute the same DPO step and the same reference."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jrl.forward import Reader
from jrl.learners.dpo import init_dpo_state, make_dpo_update, reference_logprobs
from jrl.learners.dpo_config import DPOConfig
from jrl.trainers.dpo import DPOTrainer
from tests.learners.batches import CHUNK_BYTES, adam, random_preferences
from tests.mesh.test_mesh_updates import (
    LR,
    NUM_ROWS,
    REMATERIALIZED,
    assert_metrics_agree,
    first_moment,
    largest,
    place,
    relative_to_norm,
    run,
    significant,
)
from tests.tiny import tiny_policy
from tests.trainers.runs import PREFERENCES, dpo_config, repeatable, save_tiny_checkpoint

pytestmark = pytest.mark.mesh

CASES = {
    "weighed": ({"loss_type": ["sigmoid", "sft"], "ld_alpha": 0.5, "use_weighting": True}, 8),
    "synced": ({"sync_ref_model": True, "ref_model_sync_steps": 1}, 8),
    "sorted": ({"loss_type": ["aot", "kto_pair"]}, NUM_ROWS),
}


def step(name: str, mesh: Mesh | None) -> tuple[Any, dict[str, float]]:
    """One optimizer step on pairs of which two only fill the batch up."""
    fields, minibatch_size = CASES[name]
    config = DPOConfig(**fields)
    policy, params, frozen, _ = tiny_policy("llama", 1, None)
    update = make_dpo_update(
        Reader(policy, chunk_bytes=CHUNK_BYTES),
        adam(LR),
        config,
        batch_size=NUM_ROWS,
        minibatch_size=minibatch_size,
    )
    ref_params = jax.tree.map(jnp.copy, params) if config.sync_ref_model else None
    state = init_dpo_state(params, adam(LR), ref_params)
    return run(update, mesh, state, frozen, random_preferences(NUM_ROWS, copies=2))


@functools.cache
def alone(name: str) -> tuple[Any, dict[str, float]]:
    """What one device computes."""
    return step(name, None)


@pytest.mark.parametrize("name", CASES)
def test_lore_5_2_gradients_and_metrics_agree(
    name: str, mesh: Mesh, capfd: pytest.CaptureFixture[str]
) -> None:
    wanted, wanted_metrics = alone(name)
    capfd.readouterr()
    actual, metrics = step(name, mesh)
    assert REMATERIALIZED not in capfd.readouterr().err
    assert_metrics_agree(metrics, wanted_metrics)
    assert largest(relative_to_norm, first_moment(actual), first_moment(wanted)) < 1e-5
    moved = jax.tree.map(significant, first_moment(wanted), actual.params, wanted.params)
    assert max(jax.tree.leaves(moved)) < 0.05 * LR


def test_the_reference_is_that_of_one_device(mesh: Mesh, capfd: pytest.CaptureFixture[str]) -> None:
    policy, params, frozen, _ = tiny_policy("llama", 1, None)
    score = jax.jit(
        functools.partial(reference_logprobs, Reader(policy, chunk_bytes=CHUNK_BYTES), minibatch_size=8)
    )
    batch = random_preferences(NUM_ROWS)
    wanted = jax.device_get(score(params, frozen, batch))
    placed = place(mesh, params, frozen, batch)
    capfd.readouterr()
    with jax.set_mesh(mesh):
        got = jax.device_get(score(*placed))
    assert REMATERIALIZED not in capfd.readouterr().err
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), got, wanted)


@pytest.mark.parametrize("follows", [False, True])
def test_the_figures_of_a_whole_run_agree(follows: bool, tmp_path: Path) -> None:
    """The reference scores the data once, or is read from a folder of its own and follows the policy."""
    checkpoint = save_tiny_checkpoint(tmp_path / "model", "llama")
    method = (
        {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_path": checkpoint} if follows else {}
    )
    found = []
    for data, fsdp, tensor in ((8, 1, 1), (2, 2, 2)):
        mesh = {"data": data, "fsdp": fsdp, "tensor": tensor}
        train = {"mesh": mesh, "batch_size": 8, "minibatch_size": 8, "total_steps": 2}
        config = dpo_config(checkpoint, tmp_path / f"data{data}", train=train, method=method)
        trainer = DPOTrainer(config)
        trainer.add_samples(PREFERENCES)
        trainer.learn()
        found.append([record for record in repeatable(trainer.history) if "iteration" in record])
    for one, other in zip(*found, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-4)
    assert found[0][0]["dpo/loss"] == pytest.approx(np.log(2), abs=1e-5)
