# SPDX-License-Identifier: Apache-2.0
"""The decoder: causality, rows, padding, dtypes and initialisation."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models.model import CausalLM
from jrl.models.transformer import Decoder, init_decoder
from tests.tiny import VOCAB_SIZE, tiny_hf_config, tiny_lm, tiny_policy, tiny_prompts

FAMILIES = ["gpt2", "llama"]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    lm, params = tiny_lm(request.param)
    return jax.jit(lm.logits), params


def test_lore_1_6_logits_at_t_read_tokens_up_to_t_and_score_t_plus_1(model):
    logits, params = model
    tokens = jax.random.randint(jax.random.key(0), (1, 9), 2, VOCAB_SIZE)
    whole = logits(params, tokens, jnp.ones((1, 9), bool))[0]
    # Every prefix alone, right-padded into one batch: its last logits are what the whole row says there.
    mask = jnp.tril(jnp.ones((9, 9), bool))
    prefixes = logits(params, jnp.where(mask, tokens, 0), mask)
    np.testing.assert_allclose(whole, prefixes[jnp.arange(9), jnp.arange(9)], atol=1e-5)
    # And what follows changes nothing before it, but does change what comes after it.
    other = logits(params, tokens.at[0, 5].set(3), jnp.ones((1, 9), bool))[0]
    np.testing.assert_array_equal(whole[:5], other[:5])
    assert float(jnp.abs(whole[5:] - other[5:]).max(axis=-1).min()) > 1e-3


def test_lore_2_8_a_row_does_not_depend_on_its_neighbours():
    lm, params = tiny_lm("llama")
    logits = jax.jit(lm.logits)
    prompts = tiny_prompts(64, 12)
    alone, eight, all_rows = (
        logits(params, prompts.tokens[:n], prompts.attention_mask[:n]) for n in (1, 8, 64)
    )
    real = prompts.attention_mask
    np.testing.assert_allclose(alone[real[:1]], all_rows[:1][real[:1]], atol=1e-5)
    np.testing.assert_allclose(eight[real[:8]], all_rows[:8][real[:8]], atol=1e-5)


def test_padding_holds_any_id_and_never_makes_nan():
    policy, params, frozen, _ = tiny_policy("llama")
    prompts = tiny_prompts(4, 8)
    mask = prompts.attention_mask.at[3].set(False)

    @jax.jit
    def hidden(tokens):
        inputs = prompts._replace(tokens=tokens, attention_mask=mask)
        return policy.branch(params, frozen, None, inputs, None).policy

    clean = hidden(jnp.where(mask, prompts.tokens, 0))
    dirty = hidden(jnp.where(mask, prompts.tokens, 10**6))
    np.testing.assert_array_equal(clean, dirty)
    assert bool(jnp.isfinite(dirty).all())


def test_a_real_id_outside_the_vocabulary_is_seen(model):
    logits, params = model
    assert bool(jnp.isnan(logits(params, jnp.full((1, 9), 1000), jnp.ones((1, 9), bool))).all())


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_vocabulary_has_no_probability_and_no_gradient(family):
    policy, params, frozen, _ = tiny_policy(family)
    prompts = tiny_prompts(2, 6)

    @jax.jit
    @jax.grad
    def gradient(params):
        features = policy.branch(params, frozen, None, prompts, None)
        return jax.nn.logsumexp(policy.logits(params, frozen, features.policy), axis=-1).sum()

    logits = jax.jit(policy.logits)(params, frozen, jnp.ones((3, 32)))
    assert logits.shape == (3, 128)
    assert bool(jnp.isneginf(logits[:, VOCAB_SIZE:]).all()) and bool(
        jnp.isfinite(logits[:, :VOCAB_SIZE]).all()
    )
    grads = gradient(params)
    head = grads["embed"]["embedding"] if family == "gpt2" else grads["lm_head"]["kernel"].T
    assert float(jnp.abs(head[VOCAB_SIZE:]).max()) == 0.0
    assert float(jnp.abs(head[:VOCAB_SIZE]).min(axis=-1).max()) > 0.0
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize("family", FAMILIES)
def test_lore_2_5_head_accumulates_and_answers_in_float32(family):
    lm, params = tiny_lm(family)
    hidden = jax.random.normal(jax.random.key(0), (4, 32)) * 8
    # Op by op: inside one program the compiler is free to skip a rounding to bfloat16, and the mistake with it.
    logits = lm.policy(compute_dtype=jnp.bfloat16).logits(params, {}, hidden)[:, :VOCAB_SIZE]
    assert logits.dtype == jnp.float32
    kernel = params["embed"]["embedding"].T if family == "gpt2" else params["lm_head"]["kernel"]
    # The factors are bfloat16, their products and sums are not.
    factors = [np.asarray(x.astype(jnp.bfloat16), np.float64) for x in (hidden, kernel[:, :VOCAB_SIZE])]
    np.testing.assert_allclose(logits, factors[0] @ factors[1], atol=1e-4)
    assert bool((logits != logits.astype(jnp.bfloat16).astype(jnp.float32)).any())
    # The product of a table is one program even op by op, so what it asks of the compiler is read as well.
    asked = jax.jit(lm.policy(compute_dtype=jnp.bfloat16).logits).lower(params, {}, hidden).as_text()
    products = re.findall(r"stablehlo\.dot_general .* -> tensor<(\S+)>", asked)
    assert len(products) == 1 and products[0].endswith("xf32")


def test_bfloat16_compute_stays_near_float32():
    lm, params = tiny_lm("llama")
    prompts = tiny_prompts(4, 8)
    exact, rough = (
        jax.jit(lm.logits, static_argnames="compute_dtype")(params, *prompts[:2], compute_dtype=dtype)
        for dtype in (jnp.float32, jnp.bfloat16)
    )
    difference = jnp.abs(exact - rough)[prompts.attention_mask].max()
    assert rough.dtype == jnp.float32 and 0 < float(difference) < 0.15


def test_init_follows_the_hugging_face_recipe():
    lm = CausalLM.from_config(
        tiny_hf_config("gpt2", num_layers=2, n_embd=128, n_inner=512, initializer_range=0.02)
    )
    params = jax.device_get(lm.init(jax.random.key(0)))
    assert float(params["layers_0"]["mlp"]["up"]["kernel"].std()) == pytest.approx(0.02, rel=0.03)
    # GPT-2 scales what writes to the residual stream by 1/sqrt(2 · layers) = 1/2.
    assert float(params["layers_1"]["mlp"]["down"]["kernel"].std()) == pytest.approx(0.01, rel=0.03)
    assert float(params["layers_1"]["attn"]["o"]["kernel"].std()) == pytest.approx(0.01, rel=0.03)
    assert not params["layers_0"]["attn"]["q"]["bias"].any()
    assert not params["embed"]["embedding"][VOCAB_SIZE:].any()
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}


def test_init_rejects_heads_that_do_not_group():
    config = tiny_lm("llama")[0].config
    with pytest.raises(ValueError, match="`num_kv_heads` must divide num_heads = 4"):
        dataclasses.replace(config, num_kv_heads=3)
    with pytest.raises(ValueError, match="must be even and at least 2, got 7"):
        dataclasses.replace(config, head_dim=7)


def test_parts_need_only_their_own_parameters():
    lm, params = tiny_lm("llama")
    x = jnp.ones((1, 3, 32))
    decoder = Decoder(lm.config)
    decoder.apply({"params": {"final_norm": params["final_norm"]}}, x, method="norm")
    decoder.apply({"params": {"lm_head": params["lm_head"]}}, x, method="logits")
    shapes = jax.eval_shape(lambda: init_decoder(lm.config, jax.random.key(0)))
    assert jax.tree.structure(shapes) == jax.tree.structure(params)
