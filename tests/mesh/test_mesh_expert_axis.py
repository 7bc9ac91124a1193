# SPDX-License-Identifier: Apache-2.0
"""The axis `expert`: each device holds whole experts, and computes with the others what one device computes."""

from __future__ import annotations

import copy
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jrl.mesh import batch_sharding, experts_parts, make_mesh, replicated, tree_shardings
from jrl.models.adapters import LoraConfig
from jrl.models.model import CausalLM
from jrl.models.quantize import quantize_frozen
from jrl.models.routing import expert_layers
from jrl.ops.logprobs import logprobs_from_logits
from jrl.typing import ModelInputs
from tests.mesh.hlo import collectives
from tests.mesh.test_mesh_experts import REMATERIALIZED
from tests.models.family_cases import CASES

pytestmark = pytest.mark.mesh

ON_EXPERTS = LoraConfig(
    r=2, target_modules=("q_proj",), target_parameters=("experts.gate_up_proj", "experts.down_proj")
)


EIGHT = {"qwen3_moe-some-layers": {"num_experts": 8}, "gpt_oss": {"num_local_experts": 8}}


@functools.cache
def model(case: str) -> tuple[CausalLM, Any]:
    """A model of eight experts, which the meshes divide."""
    config = copy.deepcopy(CASES[case])
    for name, value in EIGHT.get(case, {}).items():
        setattr(config, name, value)
    lm = CausalLM.from_config(config)
    return lm, lm.init(jax.random.key(0))


@functools.cache
def expected(case: str, num_rows: int) -> tuple[Any, Any]:
    """(gradient, logits) of one device."""
    lm, params = model(case)
    step = jax.jit(jax.grad(functools.partial(objective, lm), has_aux=True))
    return jax.device_get(step(params, some_tokens(num_rows)))


def some_tokens(num_rows: int) -> Any:
    return jax.random.randint(jax.random.key(1), (num_rows, 12), 2, 97)


def on_mesh(mesh: Mesh, params: Any, tokens: Any) -> tuple[Any, Any]:
    rows = replicated(mesh) if len(tokens) % 8 else batch_sharding(mesh)
    return jax.device_put(params, tree_shardings(mesh, params)[0]), jax.device_put(tokens, rows)


def objective(lm: CausalLM, params: Any, tokens: Any) -> Any:
    logits = lm.logits(params, tokens)
    return logprobs_from_logits(logits[:, :-1], tokens[:, 1:]).mean(), logits


def relative(a: Any, b: Any) -> float:
    return float(np.linalg.norm(np.asarray(a) - np.asarray(b)) / max(np.linalg.norm(b), 1e-6))


def worst(found: Any, wanted: Any) -> float:
    return max(jax.tree.leaves(jax.tree.map(relative, found, wanted)))


# The last has fewer rows than devices, so that all devices have all of them.
@pytest.mark.parametrize(
    ("sizes", "case", "num_rows"),
    [
        (dict(data=2, expert=4), "qwen3_moe-some-layers", 16),
        (dict(data=1, fsdp=2, tensor=2, expert=2), "qwen3_moe-some-layers", 16),
        (dict(data=2, fsdp=2, expert=2), "gpt_oss", 16),
        (dict(data=2, expert=4), "qwen3_moe-some-layers", 3),
    ],
)
def test_logits_and_gradients_are_those_of_one_device(
    sizes: dict[str, int], case: str, num_rows: int, capfd: pytest.CaptureFixture[str]
) -> None:
    lm, params = model(case)
    wanted_gradient, wanted = expected(case, num_rows)
    assert float(np.abs(wanted).max()) > 0.5
    mesh = make_mesh(**sizes)
    params, tokens = on_mesh(mesh, params, some_tokens(num_rows))
    layer = expert_layers(lm.config)[0]
    placed = params[f"layers_{layer}"]["experts"]["gate"]
    assert placed.sharding.shard_shape(placed.shape)[0] * sizes["expert"] == placed.shape[0]
    capfd.readouterr()
    with jax.set_mesh(mesh):
        gradient, logits = jax.jit(jax.grad(functools.partial(objective, lm), has_aux=True))(params, tokens)
    assert REMATERIALIZED not in capfd.readouterr().err
    np.testing.assert_allclose(logits, wanted, atol=1e-5)
    assert worst(jax.device_get(gradient), wanted_gradient) < 1e-5


def test_no_device_ever_has_an_expert_of_another() -> None:
    """Tokens are gathered along `expert` and sums of answers scattered; weights, and their gradients, stay."""
    lm, params = model("qwen3_moe-some-layers")
    mesh = make_mesh(data=2, expert=4)
    params, tokens = on_mesh(mesh, params, jnp.ones((16, 12), jnp.int32))
    with jax.set_mesh(mesh):
        step = jax.jit(jax.grad(lambda params, tokens: objective(lm, params, tokens)[0]))
        text = step.lower(params, tokens).compile().as_text()
    layer = expert_layers(lm.config)[0]
    _, width, inner = params[f"layers_{layer}"]["experts"]["gate"].shape
    along = [one for one in collectives(text, mesh) if "expert" in one.axes]
    kinds = {one.kind for one in along}
    assert "all-gather" in kinds and any("reduce" in kind for kind in kinds)
    of_weights = [
        array.shape for one in along for array in one.arrays if {width, inner} <= set(array.shape[-2:])
    ]
    assert not of_weights, of_weights


def adapted(mesh: Mesh | None, kind: str) -> tuple[Any, Any]:
    """Logits, and the gradient of a LoRA on experts, of tokens that visit the experts of a record."""
    lm, whole = model("qwen3_moe-some-layers")
    whole = quantize_frozen(whole, kind=kind)
    params, frozen = lm.split_params(whole, adapter=ON_EXPERTS, key=jax.random.key(1))
    params = jax.tree.map(lambda x: x + 0.05 * jax.random.normal(jax.random.key(2), x.shape), params)
    policy = lm.policy(adapter=ON_EXPERTS)
    layers = expert_layers(lm.config)
    experts = lm.config.layers[layers[0]].experts
    assert experts is not None
    tokens = jax.random.randint(jax.random.key(3), (16, 12), 2, 97)
    record = jnp.stack(
        [
            jax.random.permutation(key, experts.count)[: experts.per_token]
            for key in jax.random.split(jax.random.key(4), 16 * 12 * len(layers))
        ]
    ).reshape(16, 12, len(layers), experts.per_token)
    # Half of the tokens have none, and choose for themselves.
    record = record.at[:, ::2].set(-1)

    def loss(params: Any, frozen: Any, tokens: Any, record: Any) -> tuple[Any, Any]:
        inputs = ModelInputs(tokens, jnp.ones(tokens.shape, bool), experts=record)
        hidden = policy.branch(params, frozen, policy.trunk(frozen, inputs), inputs, None).policy
        logits = policy.logits(params, frozen, hidden)[..., :97]
        return logprobs_from_logits(logits[:, :-1], tokens[:, 1:]).mean(), logits

    step = jax.jit(jax.grad(loss, has_aux=True))
    if mesh is None:
        return jax.device_get(step(params, frozen, tokens, record))
    params, frozen = (jax.device_put(tree, tree_shardings(mesh, tree)[0]) for tree in (params, frozen))
    tokens, record = (jax.device_put(x, batch_sharding(mesh)) for x in (tokens, record))
    with jax.set_mesh(mesh):
        return jax.device_get(step(params, frozen, tokens, record))


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_lora_on_experts_and_routing_replay(kind: str) -> None:
    wanted_gradient, wanted = adapted(None, kind)
    gradient, logits = adapted(make_mesh(data=2, expert=4), kind)
    np.testing.assert_allclose(logits, wanted, atol=1e-5)
    assert worst(gradient, wanted_gradient) < 1e-5


def test_experts_that_the_axis_does_not_divide_are_refused() -> None:
    _, params = model("mixtral")
    mesh = make_mesh(data=4, expert=2)
    assert experts_parts(mesh) == 2
    with pytest.raises(ValueError, match="`expert` axis that divides the model's 5 experts, got expert=2"):
        tree_shardings(mesh, params)
