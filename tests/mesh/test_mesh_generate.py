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

from jrl.mesh import make_mesh, replicated, rows_of_device, tree_shardings
from jrl.models import cache, fused_attention
from jrl.models.decoder_policy import DecoderPolicy
from jrl.models.fused_attention import AttnImplementation
from jrl.placement import rows_sharding
from jrl.rollout import generate
from jrl.rollout.generate import make_generate, prefill_rows
from jrl.typing import Completions, SamplingKnobs
from tests.tiny import EOS_ID, PAD_ID, VOCAB_SIZE, loud_heads, tiny_lm, tiny_policy, tiny_prompts

pytestmark = pytest.mark.mesh

NUM_ROWS = 16
REMATERIALIZED = "Involuntary full rematerialization"


def sample(
    mesh: Mesh | None,
    family: str,
    *,
    is_steered: bool = False,
    num_generations: int = 1,
    attention: AttnImplementation = "einsum",
) -> Completions:
    """Completions of the tiny prompts under one key, on the host; those of ILQL with a transition mask."""
    policy, params, frozen, _ = tiny_policy(family, 1, num_q_heads=2 if is_steered else 0)
    if attention != "einsum":
        policy = tiny_lm(family)[0].policy(num_layers_unfrozen=1, attn_implementation=attention)
    settings: dict[str, Any] = dict(max_new_tokens=12, eos_token_ids=(EOS_ID,), pad_token_id=PAD_ID)
    run = jax.jit(make_generate(policy, **settings, num_generations=num_generations))
    rows: Any = (tiny_prompts(NUM_ROWS // num_generations), jnp.arange(NUM_ROWS))
    knobs, key = SamplingKnobs(jnp.float32(0.8), jnp.float32(0.95)), jax.random.key(3)
    if is_steered:
        forbidden = jnp.asarray(np.random.default_rng(0).random((VOCAB_SIZE, VOCAB_SIZE)) < 0.5)
        params, knobs = loud_heads(params), knobs._replace(beta=jnp.float32(0.3), forbidden=forbidden)
    if mesh is None:
        return jax.device_get(run(params, frozen, *rows, knobs, key))
    params, frozen = (jax.device_put(tree, tree_shardings(mesh, tree)[0]) for tree in (params, frozen))
    rows = jax.tree.map(lambda x: jax.device_put(x, rows_sharding(mesh, x.shape[0])), rows)
    knobs, key = jax.device_put((knobs, key), replicated(mesh))
    with jax.set_mesh(mesh):
        return jax.device_get(run(params, frozen, *rows, knobs, key))


@functools.cache
def expected(family: str, is_steered: bool, num_generations: int = 1) -> Completions:
    """What one device samples."""
    return sample(None, family, is_steered=is_steered, num_generations=num_generations)


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


@pytest.mark.parametrize("num_generations", [2, 4])
def test_samples_that_share_a_pass_over_their_prompt_are_those_of_one_device(
    num_generations: int, mesh: Mesh, capfd: pytest.CaptureFixture[str]
) -> None:
    """With 4 samples each, there are fewer prompts than devices."""
    wanted = expected("llama", False, num_generations)
    capfd.readouterr()
    actual = sample(mesh, "llama", num_generations=num_generations)
    assert REMATERIALIZED not in capfd.readouterr().err
    np.testing.assert_array_equal(actual.tokens, wanted.tokens)
    np.testing.assert_allclose(actual.logprobs, wanted.logprobs, atol=1e-5)


@pytest.mark.parametrize("is_sliced", [True, False], ids=["one buffer", "several buffers"])
def test_a_cache_that_is_read_in_parts_gives_the_ids_of_one_device(
    is_sliced: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """19 columns in parts of eight, with key/value heads that are repeated and split."""
    wanted = expected("llama", False)
    monkeypatch.setattr(cache, "READ_COLUMNS", 8)
    monkeypatch.setattr(cache, "reads_slices", lambda _: is_sliced)
    capfd.readouterr()
    actual = sample(make_mesh(1, 2, 4), "llama")
    assert REMATERIALIZED not in capfd.readouterr().err
    np.testing.assert_array_equal(actual.tokens, wanted.tokens)
    np.testing.assert_allclose(actual.logprobs, wanted.logprobs, atol=1e-5)


@pytest.mark.parametrize("num_generations", [1, 2])
def test_prompts_that_are_read_by_rows_give_the_ids_of_one_device(
    num_generations: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Half of each device's rows at a time."""
    wanted = expected("llama", False, num_generations)
    mesh = make_mesh(2, 2, 2)
    monkeypatch.setattr(generate, "PREFILL_TOKENS", 8 * NUM_ROWS // 8 // num_generations)
    with jax.set_mesh(mesh):
        assert 2 * prefill_rows(NUM_ROWS // num_generations, 8) == rows_of_device(NUM_ROWS // num_generations)
    capfd.readouterr()
    actual = sample(mesh, "llama", num_generations=num_generations)
    assert REMATERIALIZED not in capfd.readouterr().err
    np.testing.assert_array_equal(actual.tokens, wanted.tokens)
    np.testing.assert_allclose(actual.logprobs, wanted.logprobs, atol=1e-5)


@pytest.mark.parametrize("attention", ["xla", "splash"])
def test_prompts_that_go_through_a_kernel_give_the_ids_of_one_device(
    attention: AttnImplementation, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Key/value heads are repeated and split; by all but "splash" rows are turned for it."""
    wanted = expected("llama", False)
    if attention == "splash":
        monkeypatch.setattr(fused_attention, "platform", lambda: "tpu")
    capfd.readouterr()
    actual = sample(make_mesh(1, 2, 4), "llama", attention=attention)
    assert REMATERIALIZED not in capfd.readouterr().err
    np.testing.assert_array_equal(actual.tokens, wanted.tokens)
    np.testing.assert_allclose(actual.logprobs, wanted.logprobs, atol=1e-5)


def test_by_the_decoding_kernel_the_ids_are_those_of_one_device(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Interpreted, and on each device for its own rows and heads."""
    wanted = expected("llama", False)
    monkeypatch.setattr(DecoderPolicy, "_by_kernel", True)
    capfd.readouterr()
    actual = sample(make_mesh(1, 2, 4), "llama")
    assert REMATERIALIZED not in capfd.readouterr().err
    np.testing.assert_array_equal(actual.tokens, wanted.tokens)
    np.testing.assert_allclose(actual.logprobs, wanted.logprobs, atol=1e-5)
