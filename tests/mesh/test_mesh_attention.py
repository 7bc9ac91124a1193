# SPDX-License-Identifier: Apache-2.0
"""Attention by one kernel on eight devices: the same update as by einsums on one.

The kernel is XLA's own. cuDNN's is called in the same way, with arrays that are split in the same way.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from jax.sharding import Mesh

from jrl.learners.ppo import PPOConfig
from jrl.learners.state import TrainState
from jrl.models.fused_attention import AttnImplementation
from tests.learners.batches import CHUNK_BYTES, sgd, stored_rollouts
from tests.learners.ppo_parts import ppo_state, ppo_update
from tests.mesh.test_mesh_updates import (
    NUM_ROWS,
    REMATERIALIZED,
    assert_metrics_agree,
    difference,
    largest,
    ratio_noise,
    run,
)
from tests.tiny import tiny_lm, tiny_policy

pytestmark = pytest.mark.mesh


def ppo(mesh: Mesh | None, implementation: AttnImplementation) -> tuple[TrainState, dict[str, Any]]:
    """Two steps over stored rollouts of ragged lengths, with a frozen trunk."""
    _, params, frozen, _ = tiny_policy("llama", 1)
    policy = tiny_lm("llama")[0].policy(num_layers_unfrozen=1, attn_implementation=implementation)
    config, optimizer = PPOConfig(ppo_epochs=1, target=1.0), sgd(0.1)
    update = ppo_update(
        policy,
        optimizer,
        config,
        batch_size=NUM_ROWS // 2,
        minibatch_size=8,
        logprob_chunk_bytes=CHUNK_BYTES,
        temperature=0.8,
    )
    rollouts = stored_rollouts("llama", 1, num_rows=NUM_ROWS, temperature=0.8, drift=0.1)
    return run(update, mesh, ppo_state(params, optimizer, config), frozen, rollouts)


@functools.cache
def by_einsums() -> tuple[TrainState, dict[str, Any]]:
    """What one device computes."""
    return ppo(None, "einsum")


def test_a_kernel_on_eight_devices_is_einsums_on_one(mesh: Mesh, capfd: pytest.CaptureFixture[str]) -> None:
    wanted, wanted_metrics = by_einsums()
    capfd.readouterr()
    actual, metrics = ppo(mesh, "xla")
    assert REMATERIALIZED not in capfd.readouterr().err
    assert_metrics_agree(metrics, wanted_metrics, ratio_noise("llama", 1))
    assert largest(difference, actual.params, wanted.params) < 1e-6
