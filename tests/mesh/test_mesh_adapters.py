# SPDX-License-Identifier: Apache-2.0
"""On the same samples, one device and eight train the same adapter, on a rounded base too."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jrl.learners.sft import make_sft_update
from jrl.learners.state import init_train_state
from jrl.mesh import tree_shardings
from jrl.models.adapters import LoraConfig, PrefixConfig
from jrl.models.quantize import quantize_frozen
from tests.learners.batches import CHUNK_BYTES, random_sequences, sgd
from tests.mesh.test_mesh_updates import LR, REMATERIALIZED, run
from tests.tiny import tiny_lm

pytestmark = pytest.mark.mesh

CASES = {
    "lora": (LoraConfig(r=2, target_modules="all-linear"), "float32"),
    "dora_int8": (LoraConfig(r=2, target_modules=("q_proj", "o_proj", "down_proj"), use_dora=True), "int8"),
    "lora_nf4": (LoraConfig(r=2, target_modules="all-linear"), "nf4"),
    "prefix": (PrefixConfig(3), "float32"),
}


@functools.cache
def parts(name: str) -> tuple[Any, Any, Any]:
    """(update, state, frozen) of a case, the adapter away from its start."""
    config, kind = CASES[name]
    lm, whole = tiny_lm("llama")
    params, frozen = lm.split_params(quantize_frozen(whole, kind), adapter=config, key=jax.random.key(0))
    params = jax.tree.map(lambda x: x + 0.05, params)
    update = make_sft_update(
        lm.policy(adapter=config), sgd(LR), batch_size=16, minibatch_size=8, logprob_chunk_bytes=CHUNK_BYTES
    )
    return update, init_train_state(params, sgd(LR)), frozen


@functools.cache
def alone(name: str) -> Any:
    """The state after an update on one device."""
    return run(parts(name)[0], None, *parts(name)[1:], random_sequences(16))


@pytest.mark.parametrize("name", CASES)
def test_one_device_and_eight_train_the_same_adapter(
    name: str, mesh: Mesh, capfd: pytest.CaptureFixture[str]
) -> None:
    wanted, wanted_metrics = alone(name)
    got, metrics = run(parts(name)[0], mesh, *parts(name)[1:], random_sequences(16))
    np.testing.assert_allclose(metrics["sft/loss"], wanted_metrics["sft/loss"], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got.params, wanted.params)
    assert REMATERIALIZED not in capfd.readouterr().err


def test_rounded_kernels_lie_split_over_the_mesh(mesh: Mesh) -> None:
    frozen = parts("lora_nf4")[2]
    placed = jax.device_put(frozen, tree_shardings(mesh, frozen)[0])
    kernel = placed["layers_0"]["attn"]["o"]["kernel"]
    split = mesh.shape["tensor"] * mesh.shape["fsdp"]
    assert kernel.values.addressable_shards[0].data.size == kernel.values.size // split
    np.testing.assert_array_equal(
        jax.jit(lambda k: k.astype(jnp.float32))(kernel),
        frozen["layers_0"]["attn"]["o"]["kernel"].astype(jnp.float32),
    )
