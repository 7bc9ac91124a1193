# SPDX-License-Identifier: Apache-2.0
"""Where parameters are split over `fsdp`, each pass of an update gathers a layer's kernels for itself.

So it is on GPUs and TPUs; a CPU is told that it is a GPU.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jrl.mesh import make_mesh, path_name, tree_shardings
from jrl.models import layer_loop
from jrl.models.model import make_model
from tests.mesh.hlo import collectives
from tests.models.test_layer_loop import DROPPING, assert_close, deep, objective, parts
from tests.tiny import tiny_contexts, tiny_hf_config, tiny_prompts

pytestmark = pytest.mark.mesh


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_loop, "platform", lambda: "gpu")


def placed(name: str, mesh: Any) -> Any:
    _, params, frozen, _ = parts(name)
    return tuple(jax.device_put(tree, tree_shardings(mesh, tree)[0]) for tree in (params, frozen))


def graded(name: str) -> Any:
    run = jax.value_and_grad(objective(name, False), has_aux=True)
    return jax.jit(lambda params, frozen: run(params, frozen, None))


@pytest.mark.parametrize("name", ["lora", "hydra", "gemma4_lenders", "int8"])
@pytest.mark.usefixtures("on_gpu")
def test_the_gradient_is_that_of_one_device(name: str) -> None:
    _, params, frozen, _ = parts(name)
    expected = jax.device_get(graded(name)(params, frozen))
    mesh = make_mesh(2, 2, 2)
    with jax.set_mesh(mesh):
        assert_close(jax.device_get(graded(name)(*placed(name, mesh))), expected)


@pytest.mark.parametrize("name", ["gpt2", "t5", "mixtral"])
def test_dropout_and_the_load_of_experts_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is computed again draws what it drew, and counts no token twice."""
    dropping: dict[str, Any] = {"gpt2": DROPPING, "t5": {"dropout_rate": 0.3}, "mixtral": {}}
    lm = make_model(tiny_hf_config(name, 1, **dropping[name]) if dropping[name] else deep(name, 1))
    inputs = tiny_contexts(4, 7, 9) if name == "t5" else tiny_prompts(4, 11)
    params, frozen = lm.split_params(lm.init(jax.random.key(0)), key=jax.random.key(1))
    counts = {"counts_experts": True} if name == "mixtral" else {}
    policy, mesh = lm.policy(share_layers=False, **counts), make_mesh(1, 2, 1, devices=jax.devices()[:2])
    params, frozen = (jax.device_put(tree, tree_shardings(mesh, tree)[0]) for tree in (params, frozen))

    def total(params: Any, frozen: Any, key: Any) -> Any:
        features = policy.branch(params, frozen, policy.trunk(frozen, inputs), inputs, key)
        load = sum(jnp.sum(leaf, dtype=jnp.float32) for leaf in jax.tree.leaves(features.load))
        return jnp.sin(features.policy).sum() + load, load

    def graded(device: str, key: Any) -> Any:
        monkeypatch.setattr(layer_loop, "platform", lambda: device)
        run = jax.value_and_grad(total, has_aux=True)
        with jax.set_mesh(mesh):
            return jax.device_get(jax.jit(lambda *given: run(*given))(params, frozen, key))

    key = jax.random.key(7)
    found, expected = graded("gpu", key), graded("cpu", key)
    assert_close(found, expected)
    (value, load), _ = expected
    assert load > 0 if name == "mixtral" else value != graded("cpu", None)[0][0]


@pytest.mark.parametrize("name", ["gpt2", "t5", "hydra", "gemma4_lenders", "mixtral"])
@pytest.mark.usefixtures("on_gpu")
def test_each_pass_gathers_the_kernels_of_a_layer(name: str) -> None:
    """Those that its gradient reads again, of the layers that train."""
    mesh = make_mesh(1, 2, 1, devices=jax.devices()[:2])
    params, frozen = placed(name, mesh)
    with jax.set_mesh(mesh):
        found = collectives(graded(name).lower(params, frozen).compile().as_text(), mesh)
    gathers = Counter(array.shape for one in found if one.kind == "all-gather" for array in one.arrays)
    expected = Counter(2 * outputs(params) + outputs(frozen))
    assert expected and all(gathers[shape] == count for shape, count in expected.items())


def outputs(tree: Any) -> list[tuple[int, ...]]:
    """Shapes of the kernels out of attention, which no other parameters have."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [leaf.shape for path, leaf in leaves if path_name(path).endswith("o/kernel")]
