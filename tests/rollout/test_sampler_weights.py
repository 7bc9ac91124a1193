# SPDX-License-Identifier: Apache-2.0
"""After an update the sampler has the new weights, all of them: none is kept from before, none compiled in."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models.adapters import LoraConfig
from jrl.models.heads import init_value_head
from jrl.rollout.sampler import GenerationSettings, Sampler
from jrl.rollout.score import make_score
from jrl.typing import PolicyFns
from tests.rollout.programs import PLAIN, joined
from tests.tiny import PAD_ID, loud_heads, tiny_lm, tiny_policy, tiny_prompts

SETTINGS = GenerationSettings(max_new_tokens=6, eos_token_id=(), pad_token_id=PAD_ID)
ROWS = np.arange(4)


@functools.cache
def model(name: str) -> tuple[PolicyFns, Any, Any]:
    """(policy, params, frozen) of a way to split a model into what trains and what does not."""
    if name != "lora":
        policy, params, frozen, _ = tiny_policy("llama", {"whole": -1, "hydra": 1}[name])
        return policy, params, frozen
    lm, whole = tiny_lm("llama")
    split: dict[str, Any] = {"adapter": LoraConfig(r=2, target_modules=("q_proj", "down_proj"))}
    params, frozen = lm.split_params(whole, key=jax.random.key(0), **split)
    # A fresh B is 0, and what A says would not be heard.
    params = jax.tree.map(lambda x: x + 0.1, params)
    return (
        lm.policy(**split),
        {**params, "v_head": init_value_head("mlp", lm.feature_width, jax.random.key(1))},
        frozen,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["whole", "hydra", "lora"])
def test_lore_2_9_after_any_leaf_changes_the_record_is_that_of_the_new_weights(name):
    """One sampler, compiled once, as a trainer keeps it; what it records equals one pass with the same weights."""
    policy, params, frozen = model(name)
    sampler, prompts = Sampler(policy), tiny_prompts()
    score = jax.jit(make_score(policy, logprob_chunk_bytes=PLAIN))

    def record(weights: Any) -> tuple[np.ndarray, np.ndarray]:
        params, frozen = weights
        found = sampler(params, frozen, prompts, ROWS, SETTINGS, jax.random.key(0))
        sequences = joined(prompts, found, pad_token_id=PAD_ID)
        scored = score(params, frozen, params, sequences, np.float32(1))
        return np.asarray(found.logprobs), np.asarray(scored.logprobs)

    before, _ = record((params, frozen))
    leaves, structure = jax.tree.flatten((params, frozen))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path((params, frozen))]
    heard = 0
    for index, path in enumerate(paths):
        noise = np.random.default_rng(index).normal(size=leaves[index].shape).astype(np.float32)
        moved = [leaf + noise if i == index else leaf for i, leaf in enumerate(leaves)]
        sampled, scored = record(structure.unflatten(moved))
        np.testing.assert_allclose(sampled, scored, atol=1e-4, err_msg=path)
        changed = float(np.abs(sampled - before).max())
        # The value head says nothing about tokens.
        assert (changed == 0.0) if "v_head" in path else (changed > 1e-3), (path, changed)
        heard += changed > 1e-3
    assert heard > len(jax.tree.leaves(params)) // 2
    assert len(sampler._programs) == 1
    (program,) = sampler._programs.values()
    assert program._cache_size() == 1, "new weights, the same program"


@pytest.mark.slow
def test_lore_2_9_steering_reads_the_heads_that_it_is_given():
    policy, params, frozen, _ = tiny_policy("gpt2", num_q_heads=2)
    params = loud_heads(params)
    sampler = Sampler(policy)
    settings = GenerationSettings(6, (), PAD_ID, beta=1.0)
    calls = {}
    for name in ("as they are", "q_heads", "v_head"):
        moved = (
            {**params, name: jax.tree.map(lambda x: x + 1.0 * (x > 0), params[name])}
            if name in params
            else params
        )
        found = sampler(moved, frozen, tiny_prompts(), ROWS, settings, jax.random.key(0))
        calls[name] = np.asarray(found.logprobs)
    assert np.abs(calls["q_heads"] - calls["as they are"]).max() > 1e-3
    # Q − V: what is added to all Q alike, V is, moves no probability.
    np.testing.assert_allclose(calls["v_head"], calls["as they are"], atol=1e-4)


@pytest.mark.parametrize(
    "name", ["whole", *(pytest.param(x, marks=pytest.mark.slow) for x in ("hydra", "lora"))]
)
def test_lore_2_9_no_weight_is_compiled_into_the_sampler(name):
    policy, params, frozen = model(name)
    program = Sampler(policy).program(SETTINGS, len(ROWS))
    arguments = (params, frozen, tiny_prompts(), jnp.asarray(ROWS), SETTINGS.knobs, jax.random.key(0))
    constants = program.trace(*arguments).jaxpr.consts
    smallest = min(leaf.size for leaf in jax.tree.leaves((params, frozen)) if leaf.ndim == 2)
    assert all(np.size(constant) < smallest for constant in constants)
