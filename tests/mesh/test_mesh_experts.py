# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts computes on eight devices what it computes on one."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jrl.mesh import batch_sharding, make_mesh, replicated, tree_shardings
from jrl.models.config import Experts
from jrl.models.experts import ExpertsMlp
from jrl.models.model import CausalLM
from jrl.ops.logprobs import logprobs_from_logits
from tests.mesh.conftest import MESHES
from tests.models.family_cases import CASES
from tests.models.products.test_blocks import cost

pytestmark = pytest.mark.mesh

REMATERIALIZED = "Involuntary full rematerialization"


@functools.cache
def model(case: str) -> tuple[CausalLM, Any]:
    lm = CausalLM.from_config(CASES[case])
    return lm, lm.init(jax.random.key(0))


def logits_and_gradient(case: str, mesh: Mesh | None, num_rows: int) -> tuple[Any, Any]:
    """Logits of random rows, and the gradient of the log-probability of their tokens, on the host."""
    lm, params = model(case)
    tokens = jax.random.randint(jax.random.key(1), (num_rows, 12), 2, 97)

    @jax.jit
    def run(params: Any, tokens: Any) -> tuple[Any, Any]:
        def objective(params: Any) -> tuple[Any, Any]:
            logits = lm.logits(params, tokens)
            return logprobs_from_logits(logits[:, :-1], tokens[:, 1:]).mean(), logits

        gradient, logits = jax.grad(objective, has_aux=True)(params)
        return logits, gradient

    if mesh is None:
        return jax.device_get(run(params, tokens))
    params = jax.device_put(params, tree_shardings(mesh, params)[0])
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    tokens = jax.device_put(tokens, replicated(mesh) if num_rows % parts else batch_sharding(mesh))
    with jax.set_mesh(mesh):
        return jax.device_get(run(params, tokens))


@functools.cache
def expected(case: str, num_rows: int) -> tuple[Any, Any]:
    """What one device computes."""
    return logits_and_gradient(case, None, num_rows)


# The last one has fewer rows than devices, so that all devices compute all of them.
@pytest.mark.parametrize(
    ("sizes", "case", "num_rows"),
    [(sizes, "mixtral", 16) for sizes in (*MESHES, (2, 2, 2))]
    + [((2, 2, 2), "qwen3_moe-some-layers", 16), ((2, 2, 2), "mixtral", 3)]
    + [((2, 2, 2), name, 16) for name in ("gpt_oss", "qwen2_moe", "cohere-qk-norm", "falcon-new")],
)
def test_logits_and_gradients_are_those_of_one_device(
    sizes: tuple[int, int, int], case: str, num_rows: int, capfd: pytest.CaptureFixture[str]
) -> None:
    wanted, wanted_gradient = expected(case, num_rows)
    assert float(np.abs(wanted).max()) > 0.5
    capfd.readouterr()
    actual, gradient = logits_and_gradient(case, make_mesh(*sizes), num_rows)
    assert REMATERIALIZED not in capfd.readouterr().err
    np.testing.assert_allclose(actual, wanted, atol=1e-5)

    def relative(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-6))

    assert max(jax.tree.leaves(jax.tree.map(relative, gradient, wanted_gradient))) < 1e-5


@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2)])
def test_every_device_does_its_share(sizes: tuple[int, int, int]) -> None:
    """FLOPs of one device's program, a layer of 512 tokens: the experts' rows and widths are both split."""
    lm, _ = model("mixtral")
    config = dataclasses.replace(lm.config, width=64)
    module = ExpertsMlp(config, Experts(4, 2, 128, True), jnp.float32)
    x = jnp.zeros((32, 16, 64))
    params = {"layer": {"experts": module.init(jax.random.key(0), x)["params"]}}

    def apply(params: Any, x: Any) -> Any:
        return module.apply({"params": params["layer"]["experts"]}, x)

    alone = cost(apply, params, x)
    mesh = make_mesh(*sizes)
    params = jax.device_put(params, tree_shardings(mesh, params)[0])
    with jax.set_mesh(mesh):
        together = cost(apply, params, jax.device_put(x, batch_sharding(mesh)))
    assert together < 1.5 * alone / 8, (together, alone)


def test_experts_are_split_over_both_axes() -> None:
    mesh = make_mesh(2, 2, 2)
    _, params = model("mixtral")
    placed = jax.device_put(params, tree_shardings(mesh, params)[0])["layers_0"]["experts"]
    for name, shape in (("gate", (5, 16, 32)), ("up", (5, 16, 32)), ("down", (5, 32, 16))):
        assert placed[name].sharding.shard_shape(placed[name].shape) == shape
