# SPDX-License-Identifier: Apache-2.0
"""Attention in blocks is attention at once, in values, in gradients, and in less memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.mesh import abstract_mesh
from jrl.models import score_blocks
from jrl.models.attention import WeightDropout, attend
from jrl.models.cost import activation_bytes
from jrl.models.score_blocks import Operands, ScoreBlocks
from jrl.typing import ModelInputs
from tests.tiny import tiny_contexts, tiny_policy, tiny_prompts

B, Q, S, N, K, H = 6, 7, 9, 4, 2, 8
ROW_BYTES = 4 * N * Q * S
QUERY_BYTES = 4 * N * S
LIMITS = {"rows": 2 * ROW_BYTES, "a row": ROW_BYTES, "queries": 3 * QUERY_BYTES, "a query": 1}
"""Most bytes, by what a block then has."""
BLOCKS = {"rows": (3, 1), "a row": (6, 1), "queries": (6, 3), "a query": (6, 7)}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 1.5},
    "shared bias": {},
    "bias": {},
    "positions": {},
}


def operands(kind: str) -> Operands:
    """Rows of several lengths with padding on both sides; a query without any key is among them."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    mask = np.tril(np.ones((Q, S), bool), S - Q)[None] & (rng.random((B, 1, S)) < 0.7)
    mask[0, 0] = False
    found = Operands(normal(B, Q, N, H), (normal(B, K, S, H),), (normal(B, K, S, H),), jnp.asarray(mask))
    if kind.endswith("bias"):
        found = found._replace(bias=normal(1 if kind == "shared bias" else B, N, Q, S))
    if kind == "positions":
        at = np.cumsum(rng.integers(0, 2, size=(B, S)), axis=1)
        found = found._replace(positions=(jnp.asarray(at[:, S - Q :]), jnp.asarray(at)))
    return found


def blocked(
    monkeypatch: pytest.MonkeyPatch, limit: int, function: Callable[..., Any], *arguments: Any
) -> Any:
    """What a function computes where the scores have this limit, compiled."""
    monkeypatch.setattr(score_blocks, "SCORES_BYTES", limit)
    return jax.jit(lambda *arguments: function(*arguments))(*arguments)


@pytest.mark.parametrize("size", LIMITS)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_the_whole(monkeypatch, kind, size):
    mask, positions = operands(kind).mask, operands(kind).positions
    floats = operands(kind)._replace(mask=None, positions=None)
    direction = jax.tree.map(jnp.cos, floats)

    def out(floats: Operands) -> jax.Array:
        return attend(floats._replace(mask=mask, positions=positions), scale=0.3, **KINDS[kind])

    def loss(floats: Operands) -> jax.Array:
        return jnp.sum(jnp.sin(out(floats)))

    def everything(floats: Operands) -> Any:
        gradient, curvature = jax.jvp(jax.grad(loss), (floats,), (direction,))
        return out(floats), gradient, curvature

    wanted = blocked(monkeypatch, 1 << 28, everything, floats)
    found = blocked(monkeypatch, LIMITS[size], everything, floats)
    assert np.asarray(wanted[0]).std() > 0.1
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=3e-6), found, wanted)


@pytest.mark.parametrize("size", LIMITS)
def test_rows_are_cut_before_queries(monkeypatch, size):
    monkeypatch.setattr(score_blocks, "SCORES_BYTES", LIMITS[size])
    found = ScoreBlocks.fitting(num_rows=B, num_queries=Q, num_heads=N, num_keys=S)
    assert (found.rows, found.queries) == BLOCKS[size]


def test_what_fits_is_not_cut_and_neither_is_a_step_of_decoding():
    fitting = functools.partial(ScoreBlocks.fitting, num_heads=32, num_keys=1024)
    assert fitting(num_rows=2, num_queries=1024) == ScoreBlocks(1, 1, 1)
    assert fitting(num_rows=128, num_queries=1024) == ScoreBlocks(1, 64, 1)
    assert fitting(num_rows=1 << 14, num_queries=1) == ScoreBlocks(1, 1, 1)


def test_rows_and_heads_are_those_of_a_device():
    fitting = functools.partial(ScoreBlocks.fitting, num_queries=1024, num_keys=1024)
    with jax.sharding.use_abstract_mesh(abstract_mesh(2, 2, 2, num_devices=8)):
        assert fitting(num_rows=128, num_heads=32) == ScoreBlocks(4, 8, 1)
        assert fitting(num_rows=16, num_heads=32) == ScoreBlocks(4, 1, 1)
        # What the mesh does not divide is whole on every device.
        assert fitting(num_rows=6, num_heads=31) == ScoreBlocks(1, 3, 1)


def test_no_scores_beyond_the_limit_are_held(monkeypatch):
    """8 MiB of scores in 32 blocks of a quarter; the backward pass holds several arrays of one block."""
    rows, length, heads, width = 32, 128, 4, 4
    q = jnp.zeros((rows, length, heads, width))
    k = jnp.zeros((rows, heads, length, width))
    mask = jnp.ones((rows, length, length), bool)

    # The mask is an argument: without one XLA's CPU compiler fuses the whole of attention by itself.
    def loss(q: jax.Array, k: jax.Array, mask: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(attend(Operands(q, (k,), (k,), mask), scale=0.5)))

    def temporary(limit: int, function: Callable[..., Any]) -> int:
        monkeypatch.setattr(score_blocks, "SCORES_BYTES", limit)
        compiled = jax.jit(lambda *arguments: function(*arguments)).lower(q, k, mask).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    scores = 4 * rows * heads * length * length
    for function in (loss, jax.grad(loss, argnums=(0, 1))):
        assert temporary(scores, function) > scores
        assert temporary(scores // 32, function) < scores / 2


def test_blocks_drop_weights_by_keys_of_their_own(monkeypatch):
    rng = np.random.default_rng(0)
    rows = Operands(
        jnp.zeros((B, Q, N, H)),
        (jnp.zeros((B, N, S, H)),),
        (jnp.asarray(rng.normal(size=(1, 1, S, H)), jnp.float32) * jnp.ones((B, N, 1, 1)),),
        jnp.ones((B, Q, S), bool),
    )

    def dropped(key: jax.Array) -> jax.Array:
        return attend(rows, scale=1.0, dropout=WeightDropout(0.5, key))

    found = np.asarray(blocked(monkeypatch, ROW_BYTES, dropped, jax.random.key(0)))
    again = np.asarray(blocked(monkeypatch, ROW_BYTES, dropped, jax.random.key(0)))
    np.testing.assert_array_equal(found, again)
    # Without dropout all queries would see the same mean. 168 of them draw 9 weights each, two alike by chance alone:
    # six blocks of one key would show 28 answers at most.
    answers = found.reshape(-1, H)
    assert len(np.unique(answers, axis=0)) > 120
    mean = np.asarray(attend(rows, scale=1.0))[0, 0, 0]
    error = answers.std(axis=0) / np.sqrt(len(answers))
    assert (np.abs(answers.mean(axis=0) - mean) < 4 * error).all()


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5"])
def test_models_score_and_learn_the_same_in_blocks(monkeypatch, family):
    policy, params, frozen, _ = tiny_policy(family)
    inputs = tiny_contexts(L=6) if family == "t5" else tiny_prompts()

    def loss(params: Any) -> jax.Array:
        hidden = policy.branch(params, frozen, policy.trunk(frozen, inputs), inputs, None).policy
        logits = policy.logits(params, frozen, hidden)[..., :97]
        real = inputs.attention_mask[..., None]
        return jnp.mean(jnp.where(real, jax.nn.log_softmax(logits)[..., ::9], 0.0))

    wanted = blocked(monkeypatch, 1 << 28, jax.value_and_grad(loss), params)
    found = blocked(monkeypatch, 1, jax.value_and_grad(loss), params)
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=3e-6), found, wanted
    )


def test_packed_rows_are_the_same_in_blocks(monkeypatch):
    policy, params, frozen, _ = tiny_policy("llama")
    tokens = jnp.asarray(np.random.default_rng(0).integers(2, 97, size=(3, 10)))
    segments = jnp.asarray([[0] * 4 + [1] * 6, [0] * 10, [0] * 2 + [1] * 3 + [2] * 5])
    inputs = ModelInputs(tokens, jnp.ones((3, 10), bool), segments)

    def hidden(params: Any) -> jax.Array:
        return policy.branch(params, frozen, policy.trunk(frozen, inputs), inputs, None).policy

    wanted = blocked(monkeypatch, 1 << 28, hidden, params)
    np.testing.assert_allclose(blocked(monkeypatch, 700, hidden, params), wanted, atol=1e-5)


def test_a_plan_counts_no_scores_that_are_made_anew(monkeypatch):
    policy, params, frozen, _ = tiny_policy("gpt2")
    rows, length, heads, layers = 4, 64, 4, 2

    def planned(limit: int) -> int:
        monkeypatch.setattr(score_blocks, "SCORES_BYTES", limit)
        mesh = abstract_mesh(1, 1, 1, num_devices=1)
        sizes: Any = dict(mesh=mesh, rows=rows, length=length, split_sizes=(), has_context=False)
        return activation_bytes(policy, params, frozen, **sizes)

    row = 4 * heads * length * length
    whole = planned(rows * row)
    # Rows fit one by one, and twice as many would not together.
    assert whole - planned(row) > layers * rows * row
    assert planned(rows * row - 1) < whole
