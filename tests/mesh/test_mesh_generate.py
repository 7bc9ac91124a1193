# SPDX-License-Identifier: Apache-2.0
"""Sampled ids depend neither on the mesh nor on which device holds a row."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jrl.mesh import batch_sharding, replicated, tree_shardings
from jrl.rollout.generate import make_generate
from jrl.typing import Completions, SamplingKnobs
from tests.tiny import EOS_ID, PAD_ID, VOCAB_SIZE, loud_heads, tiny_policy, tiny_prompts

pytestmark = pytest.mark.mesh

NUM_ROWS = 16
REMATERIALIZED = "Involuntary full rematerialization"


def sample(mesh: Mesh | None, family: str, *, is_steered: bool = False) -> Completions:
    """Completions of the tiny prompts under one key, on the host; those of ILQL with a transition mask."""
    policy, params, frozen, _ = tiny_policy(family, 1, num_q_heads=2 if is_steered else 0)
    generate = jax.jit(make_generate(policy, max_new_tokens=12, eos_token_ids=(EOS_ID,), pad_token_id=PAD_ID))
    rows: Any = (tiny_prompts(NUM_ROWS), jnp.arange(NUM_ROWS))
    knobs, key = SamplingKnobs(jnp.float32(0.8), jnp.float32(0.95)), jax.random.key(3)
    if is_steered:
        forbidden = jnp.asarray(np.random.default_rng(0).random((VOCAB_SIZE, VOCAB_SIZE)) < 0.5)
        params, knobs = loud_heads(params), knobs._replace(beta=jnp.float32(0.3), forbidden=forbidden)
    if mesh is None:
        return jax.device_get(generate(params, frozen, *rows, knobs, key))
    params, frozen = (jax.device_put(tree, tree_shardings(mesh, tree)[0]) for tree in (params, frozen))
    rows = jax.device_put(rows, batch_sharding(mesh))
    knobs, key = jax.device_put((knobs, key), replicated(mesh))
    with jax.set_mesh(mesh):
        return jax.device_get(generate(params, frozen, *rows, knobs, key))


@functools.cache
def expected(family: str, is_steered: bool) -> Completions:
    """What one device samples."""
    return sample(None, family, is_steered=is_steered)


@pytest.mark.parametrize("is_steered", [False, True])
def test_lore_9_1_sampled_ids_are_those_of_one_device(
    is_steered: bool, mesh: Mesh, capfd: pytest.CaptureFixture[str]
) -> None:
    wanted = expected("llama", is_steered)
    assert len(np.unique(wanted.tokens[wanted.tokens != PAD_ID])) > 20  # the ids do vary
    capfd.readouterr()
    actual = sample(mesh, "llama", is_steered=is_steered)
    assert REMATERIALIZED not in capfd.readouterr().err
    np.testing.assert_array_equal(actual.tokens, wanted.tokens)
    np.testing.assert_array_equal(actual.lengths, wanted.lengths)
    np.testing.assert_allclose(actual.logprobs, wanted.logprobs, atol=1e-5)
