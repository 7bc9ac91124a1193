# SPDX-License-Identifier: Apache-2.0
"""Layers without plain attention compute on eight devices what they compute on one, and sample the same ids."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from jrl.learners.accumulate import take_rows
from jrl.learners.forward import trunk_of_rows
from jrl.mesh import batch_sharding, make_mesh, tree_shardings
from jrl.models.cost import device_bytes, estimate_cost
from jrl.models.model import CausalLM, make_model
from jrl.ops.logprobs import logprobs_from_logits
from jrl.rollout.generate import make_generate
from jrl.typing import ModelInputs, SamplingKnobs
from tests.mesh.hlo import collectives
from tests.mesh.shapes import on, shape
from tests.models.family_cases_gemma4 import CASES as GEMMA4
from tests.models.family_cases_mixers import CASES

pytestmark = pytest.mark.mesh

PROJECTIONS = ("v", "gate", "out", "k", "q", "step_down", "step_up")
REMATERIALIZED = "Involuntary full rematerialization"
FAMILIES = ("qwen3_next", "deepseek_v3", "kimi_linear", "lfm2", "falcon_h1", "jamba", "nemotron_h")
ROWS, LENGTH, NEW_TOKENS = 8, 12, 6


@functools.cache
def model(case: str) -> tuple[CausalLM, Any]:
    lm = CausalLM.from_config(CASES[case])
    return lm, lm.init(jax.random.key(0))


def results(case: str, mesh: Mesh | None) -> tuple[Any, Any, Any]:
    """Logits of left-padded rows, the gradient of the log-probability of their tokens, and greedy ids."""
    lm, params = model(case)
    tokens = jax.random.randint(jax.random.key(1), (ROWS, LENGTH), 2, 97)
    mask = jnp.arange(LENGTH)[None] >= jnp.arange(ROWS)[:, None] % 4
    generate = make_generate(
        lm.policy(), max_new_tokens=NEW_TOKENS, eos_token_ids=(), pad_token_id=0, do_sample=False
    )

    @jax.jit
    def run(params: Any, tokens: Any, mask: Any) -> Any:
        def objective(params: Any) -> tuple[Any, Any]:
            logits = jnp.where(mask[:, :, None], lm.logits(params, tokens, mask), 0.0)
            logprobs = logprobs_from_logits(logits[:, :-1], tokens[:, 1:])
            return jnp.where(mask[:, :-1], logprobs, 0.0).mean(), logits

        gradient, logits = jax.grad(objective, has_aux=True)(params)
        knobs = SamplingKnobs(jnp.float32(1.0), jnp.float32(1.0))
        inputs, rows = ModelInputs(tokens, mask), jnp.arange(ROWS)
        return logits, gradient, generate(params, {}, inputs, rows, knobs, jax.random.key(0)).tokens

    if mesh is None:
        return jax.device_get(run(params, tokens, mask))
    params = jax.device_put(params, tree_shardings(mesh, params)[0])
    tokens, mask = (jax.device_put(x, batch_sharding(mesh)) for x in (tokens, mask))
    with jax.set_mesh(mesh):
        return jax.device_get(run(params, tokens, mask))


@pytest.mark.parametrize("case", FAMILIES)
def test_results_are_those_of_one_device(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    wanted, wanted_gradient, wanted_ids = results(case, None)
    assert float(np.abs(wanted).max()) > 0.5
    capfd.readouterr()
    logits, gradient, ids = results(case, make_mesh(2, 2, 2))
    assert REMATERIALIZED not in capfd.readouterr().err
    np.testing.assert_allclose(logits, wanted, atol=1e-5)
    np.testing.assert_array_equal(ids, wanted_ids)

    def relative(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-6))

    assert max(jax.tree.leaves(jax.tree.map(relative, gradient, wanted_gradient))) < 2e-5


def test_heads_of_a_recurrence_are_split() -> None:
    mesh = make_mesh(2, 2, 2)
    _, params = model("qwen3_next")
    placed = jax.device_put(params, tree_shardings(mesh, params)[0])["layers_0"]["attn"]
    shapes = {
        name: leaf.sharding.shard_shape(leaf.shape)
        for name, leaf in (
            ("v", placed["v"]["kernel"]),
            ("rate", placed["rate"]["kernel"]),
            ("v_taps", placed["v_taps"]),
            ("log_rates", placed["log_rates"]),
        )
    }
    assert shapes == {"v": (16, 2, 12), "rate": (16, 2), "v_taps": (2, 12, 4), "log_rates": (2,)}


def test_decays_of_channels_are_split_by_head() -> None:
    mesh = make_mesh(2, 2, 2)
    _, params = model("kimi_linear")
    placed = jax.device_put(params, tree_shardings(mesh, params)[0])["layers_0"]["attn"]
    up, down, bias = placed["decay_up"]["kernel"], placed["gate_down"]["kernel"], placed["decay_bias"]
    shapes = [leaf.sharding.shard_shape(leaf.shape) for leaf in (up, down, bias)]
    assert shapes == [(4, 2, 8), (16, 8), (2, 8)]


def test_channels_of_a_scan_are_split_and_a_plan_knows_it() -> None:
    mesh = make_mesh(2, 2, 2)
    lm, params = model("jamba")
    placed = jax.device_put(params, tree_shardings(mesh, params)[0])
    attn = placed["layers_0"]["attn"]
    shapes = {
        name: leaf.sharding.shard_shape(leaf.shape)
        for name, leaf in {**attn, **{name: attn[name]["kernel"] for name in PROJECTIONS}}.items()
        if not name.endswith("norm")
    }
    assert shapes == {
        **{"v": (16, 32), "gate": (16, 32), "out": (32, 16), "k": (32, 5), "q": (32, 5)},
        **{"step_down": (32, 7), "step_up": (7, 32), "step_bias": (32,), "log_rates": (5, 32)},
        **{"skip": (32,), "v_taps": (32, 4), "v_taps_bias": (32,)},
    }
    inputs = ModelInputs(jnp.zeros((ROWS, LENGTH), jnp.int32), jnp.ones((ROWS, LENGTH), bool))
    with jax.set_mesh(mesh):
        cache = jax.jit(lambda params: lm.policy().init_cache(params, {}, inputs, LENGTH))(placed)
    state = cache.layers[0].state
    assert state.sharding.shard_shape(state.shape) == (ROWS // 4, 5, 32)
    entries = jax.tree.leaves(cache.layers)
    own = sum(device_bytes(leaf) for leaf in entries)
    planned = estimate_cost(lm, optax.sgd(1.0).init, mesh=mesh, rows=ROWS, length=LENGTH).cache_bytes
    # Beside the entries: the mask, positions of columns and rows, of two rows; and the column.
    assert planned - own == 2 * (LENGTH * (1 + 4) + 4) + 4, (planned, own)


def test_key_heads_that_the_tensor_axis_divides_are_never_gathered_over_it() -> None:
    mesh = make_mesh(2, 2, 2)
    lm, params = model("qwen3_5_text")
    tokens = on(mesh, shape(ROWS, LENGTH, dtype=jnp.int32), batch_sharding(mesh))

    def loss(params: Any, tokens: Any) -> Any:
        return jnp.square(lm.logits(params, tokens)).mean()

    with jax.set_mesh(mesh):
        text = jax.jit(jax.grad(loss)).lower(on(mesh, params), tokens).compile().as_text()
    over_tensor = [one for one in collectives(text, mesh) if "tensor" in one.axes]
    gathers = [(one.shapes, one.op_name) for one in over_tensor if one.kind == "all-gather"]
    assert over_tensor and not gathers


def test_lent_keys_of_a_trunk_stay_split_over_tensor() -> None:
    """All rows of them, and those of a microbatch."""
    mesh, lm, split = make_mesh(2, 2, 2), make_model(GEMMA4["gemma4_text"]), dict(num_layers_unfrozen=2)
    policy = lm.policy(**split)
    frozen = jax.eval_shape(lambda key: lm.split_params(lm.init(key), **split)[1], jax.random.key(0))
    inputs = ModelInputs(shape(ROWS, LENGTH, dtype=jnp.int32), shape(ROWS, LENGTH, dtype=jnp.bool_))

    def run(frozen: Any, inputs: ModelInputs) -> Any:
        whole = trunk_of_rows(policy, frozen, inputs, minibatch_size=ROWS // 2)
        return whole, take_rows(whole, jnp.arange(ROWS // 2))

    with jax.set_mesh(mesh):
        jitted = jax.jit(run)
        program = jitted.lower(on(mesh, frozen), on(mesh, inputs, batch_sharding(mesh))).compile()
    for rows, found in zip((ROWS, ROWS // 2), program.output_shardings, strict=True):
        keys = found.lent[2].k[0].shard_shape((rows, 2, LENGTH, 8))
        assert keys == (rows // 4, 1, LENGTH, 8)
        assert found.x.shard_shape((rows, LENGTH, 32)) == (rows // 4, LENGTH, 32)
    assert not [one for one in collectives(program.as_text(), mesh) if one.shapes[0][-2:] == (LENGTH, 8)]
