# SPDX-License-Identifier: Apache-2.0
"""On the same samples, one device and eight train the same adapter, on a rounded base too."""

from __future__ import annotations

import functools
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrl.forward import Reader
from jrl.learners.sft import make_sft_update
from jrl.learners.state import init_train_state
from jrl.mesh import make_mesh, tree_shardings
from jrl.models import quantize
from jrl.models.adapters import LoraConfig, PrefixConfig
from jrl.models.checkpoint import save_checkpoint
from jrl.models.model import make_model
from jrl.models.quantize import QuantizedKernel, quantize_frozen, quantize_kernel
from jrl.trainers.loading.setup import load_policy
from jrl.trainers.plan.hlo import collectives
from tests.learners.batches import CHUNK_BYTES, random_sequences, sgd
from tests.mesh.test_mesh_updates import LR, REMATERIALIZED, place, run
from tests.models.family_cases_moe import CASES as MOE
from tests.tiny import tiny_lm, tiny_prompts, tiny_tokenizer
from tests.trainers.runs import sft_config

pytestmark = pytest.mark.mesh

CASES = {
    "lora": ("llama", LoraConfig(r=2, target_modules="all-linear"), "float32"),
    "dora_int8": (
        "llama",
        LoraConfig(r=2, target_modules=("q_proj", "o_proj", "down_proj"), use_dora=True),
        "int8",
    ),
    "lora_nf4": ("llama", LoraConfig(r=2, target_modules="all-linear"), "nf4"),
    "experts_nf4": ("mixtral", LoraConfig(r=2, target_modules=("q_proj", "v_proj")), "nf4"),
    "experts": (
        "mixtral",
        LoraConfig(r=2, target_parameters=("experts.gate_up_proj", "experts.down_proj")),
        "float32",
    ),
    "prefix": ("llama", PrefixConfig(3), "float32"),
}


@functools.cache
def model(name: str) -> tuple[Any, Any]:
    """(model, whole parameters)."""
    if name == "llama":
        return tiny_lm("llama")
    lm = make_model(MOE[name])
    return lm, lm.init(jax.random.key(0))


@functools.cache
def parts(name: str) -> tuple[Any, Any, Any]:
    """(update, state, frozen) of a case, the adapter away from its start."""
    base, config, kind = CASES[name]
    lm, whole = model(base)
    params, frozen = lm.split_params(quantize_frozen(whole, kind), adapter=config, key=jax.random.key(0))
    params = jax.tree.map(lambda x: x + 0.05, params)
    update = make_sft_update(
        Reader(lm.policy(adapter=config), chunk_bytes=CHUNK_BYTES), sgd(LR), batch_size=16, minibatch_size=8
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


@pytest.mark.parametrize(
    ("name", "kind"), [("llama", "bfloat16"), ("llama", "int8"), ("llama", "nf4"), ("mixtral", "nf4")]
)
def test_a_run_places_rounded_weights_as_the_table_says(name: str, kind: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "model")
    save_checkpoint(folder, *model(name), tokenizer=tiny_tokenizer())
    lora = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}
    config = sft_config(folder, tmp_path, model={"peft_config": lora, "frozen_dtype": kind})
    mesh = make_mesh(2, 2, 2)
    with jax.set_mesh(mesh):
        bundle = load_policy(config, mesh, with_value_head=False)
    for tree in (bundle.params, bundle.frozen):
        wanted, _ = tree_shardings(mesh, tree)
        for (path, leaf), sharding in zip(
            jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(wanted), strict=True
        ):
            where = jax.tree_util.keystr(path)
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), (where, leaf.sharding, sharding)
    mlp = {"llama": "mlp", "mixtral": "experts"}[name]
    leaves = jax.tree.leaves(bundle.frozen["layers_0"][mlp]["up"])
    assert all(leaf.sharding.num_devices == 8 and not leaf.is_fully_replicated for leaf in leaves)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("axes", [("fsdp", "tensor"), ("tensor", "fsdp")], ids=str)
def test_four_bits_are_expanded_where_they_lie(
    mesh: Mesh, axes: tuple[str, str], platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel is not gathered before its levels are looked up, or chosen."""
    monkeypatch.setattr(quantize, "platform", lambda: platform)
    shapes = jax.eval_shape(lambda: quantize_kernel(jnp.zeros((1024, 96)), "nf4"))
    where = NamedSharding(mesh, PartitionSpec(*axes))
    stored = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), shapes)
    with jax.set_mesh(mesh):
        expand = jax.jit(lambda stored: stored.astype(jnp.float32), out_shardings=where)
        assert collectives(expand.lower(stored).compile().as_text() or "", mesh) == []


@pytest.mark.parametrize("name", ["lora_nf4", "experts_nf4"])
def test_four_bits_are_gathered_before_they_are_expanded(name: str, mesh: Mesh) -> None:
    update, state, frozen = parts(name)
    given = place(mesh, state, frozen, random_sequences(16))
    with jax.set_mesh(mesh):
        text = jax.jit(update).lower(*given, jax.random.key(0)).compile().as_text() or ""
    gathers = [one for one in collectives(text, mesh) if one.kind == "all-gather" and "fsdp" in one.axes]
    moved = [array for one in gathers if not re.search("embed|lm_head", one.op_name) for array in one.arrays]
    kernels = jax.tree.leaves(frozen, is_leaf=lambda leaf: isinstance(leaf, QuantizedKernel))
    sizes = {math.prod(leaf.shape) for leaf in kernels if isinstance(leaf, QuantizedKernel)}
    expanded = {size // parts for size in sizes for parts in (1, mesh.shape["tensor"])}
    assert not [array for array in moved if array.is_float and math.prod(array.shape) in expanded]
    assert any(array.dtype == "u8" for array in moved) is (mesh.shape["fsdp"] > 1)


def test_experts_of_four_bits_are_gathered_so_where_rows_do_not_divide(mesh: Mesh) -> None:
    _, config, _ = CASES["experts_nf4"]
    policy, prompts = model("mixtral")[0].policy(adapter=config), tiny_prompts(7, 5)
    _, state, frozen = parts("experts_nf4")
    given = [jax.device_put(tree, tree_shardings(mesh, tree)[0]) for tree in (state.params, frozen)]

    def hidden(params: Any, frozen: Any) -> Any:
        return policy.branch(params, frozen, policy.trunk(frozen, prompts), prompts, None).policy

    with jax.set_mesh(mesh):
        text = jax.jit(hidden).lower(*given).compile().as_text() or ""
    gathers = [one for one in collectives(text, mesh) if one.kind == "all-gather" and "fsdp" in one.axes]
    experts = [array for one in gathers if "experts" in one.op_name for array in one.arrays]
    assert ({"u8"} <= {array.dtype for array in experts}) is (mesh.shape["fsdp"] > 1)
    kernel = math.prod(frozen["layers_0"]["experts"]["up"].shape) // mesh.shape["tensor"]
    assert not [array for array in experts if array.is_float and math.prod(array.shape) >= kernel]
