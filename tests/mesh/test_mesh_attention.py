# SPDX-License-Identifier: Apache-2.0
"""Attention on eight devices: by one kernel, with the same update as by einsums on one, and in blocks.

The kernels are XLA's own, and TPUs' splash kernel, interpreted. cuDNN's is called as XLA's is, with arrays that are
split in the same way.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding

from jrl.learners.ppo import PPOConfig
from jrl.learners.state import TrainState
from jrl.mesh import make_mesh
from jrl.models import fused_attention, score_blocks
from jrl.models.attention import attend
from jrl.models.fused_attention import AttnImplementation
from jrl.models.score_blocks import Operands
from tests.learners.batches import CHUNK_BYTES, sgd, stored_rollouts
from tests.learners.ppo_parts import ppo_state, ppo_update
from tests.mesh.hlo import collectives
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


@pytest.mark.parametrize("implementation", ["xla", "splash"])
def test_a_kernel_on_eight_devices_is_einsums_on_one(
    mesh: Mesh,
    implementation: AttnImplementation,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    wanted, wanted_metrics = by_einsums()
    capfd.readouterr()
    if implementation == "splash":
        monkeypatch.setattr(fused_attention, "platform", lambda: "tpu")
    actual, metrics = ppo(mesh, implementation)
    assert REMATERIALIZED not in capfd.readouterr().err
    assert_metrics_agree(metrics, wanted_metrics, ratio_noise("llama", 1))
    assert largest(difference, actual.params, wanted.params) < 1e-6


@pytest.mark.parametrize("block_bytes", [1 << 16, 1 << 14], ids=["rows", "queries"])
def test_blocks_of_scores_move_nothing_between_devices(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], block_bytes: int
) -> None:
    """Neither in the forward nor in the backward pass; a device has 16 rows of two heads, 32 KiB of scores each."""
    monkeypatch.setattr(score_blocks, "SCORES_BYTES", block_bytes)
    mesh = make_mesh(2, 2, 2)
    rows, length, heads, width = 64, 64, 4, 8

    def split(*sizes: int, dtype: Any = jnp.float32, spec: Any) -> Any:
        return jax.ShapeDtypeStruct(
            sizes, dtype, sharding=NamedSharding(mesh, jax.P(("data", "fsdp"), *spec))
        )

    q = split(rows, length, heads, width, spec=(None, "tensor"))
    k = split(rows, heads, length, width, spec=("tensor",))
    mask = split(rows, length, length, dtype=bool, spec=())

    def gradients(q: Any, k: Any, v: Any, mask: Any) -> Any:
        def out(q: Any, k: Any, v: Any) -> Any:
            return attend(Operands(q, (k,), (v,), mask), scale=0.5)

        found, back = jax.vjp(out, q, k, v)
        return back(jnp.sin(found))

    with jax.set_mesh(mesh):
        compiled = jax.jit(gradients).lower(q, k, k, mask).compile()
    assert not collectives(compiled.as_text(), mesh)
    assert REMATERIALIZED not in capfd.readouterr().err
    assert compiled.memory_analysis().temp_size_in_bytes < 16 * (1 << 15)
    for found, given in zip(compiled.output_shardings, (q, k, k), strict=True):
        assert found.shard_shape(given.shape) == given.sharding.shard_shape(given.shape)
