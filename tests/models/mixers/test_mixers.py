# SPDX-License-Identifier: Apache-2.0
"""Every kind of mixer: padding is not there, packing is separate rows, and a cache goes on where it stopped."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models import cache as cache_module
from jrl.models.adapters import LoraConfig, PrefixConfig, PromptConfig
from jrl.models.config import (
    AttentionBesideMamba2,
    GatedDelta,
    LatentAttention,
    LayerConfig,
    Mamba1,
    Mamba2,
    Mixer,
    Rope,
    ShortConvolution,
)
from jrl.models.fused_attention import choose_attention
from jrl.models.model import CausalLM
from jrl.models.policy import make_policy
from jrl.models.quantize import QuantizedKernel, quantize_frozen
from jrl.rollout import generate
from jrl.rollout.generate import prefill
from jrl.typing import ModelInputs
from tests.models.family_cases import CASES
from tests.models.test_blocks import BASE, random_params

ATTENTION = LayerConfig(8**-0.5, rope=Rope(100.0))
ROPE = Rope(100.0, dim=4, interleaved=True)
ROPE_OF_HEADS = Rope(100.0)


def config_of(mixer: Mixer, rope: Rope | None = None) -> Any:
    """A layer of the mixer, one of attention, and one of the mixer again."""
    layer = LayerConfig(10**-0.5, rope=rope, mixer=mixer)
    return dataclasses.replace(
        BASE, layers=(layer, ATTENTION, layer), norm="rms", activation="silu", norm_epsilon=1e-2
    )


MAMBA = Mamba2(6, 7, 2, 5, 4, step_limits=(0.2, 2.0), value_scale=1.3, out_scale=0.7)
LENDER = LayerConfig(1.0, rope=Rope(100.0, dim=12), head_dim=12, num_kv_heads=1, lends_keys=True)
KINDS = {
    "lent-keys": dataclasses.replace(
        BASE,
        layers=(
            dataclasses.replace(LENDER, keys_as_values=True),
            ATTENTION,
            dataclasses.replace(LENDER, lends_keys=False, keys_of=0, mlp_width=40),
        ),
        norm="rms",
        norm_epsilon=1e-2,
        qk_norm="head",
        value_norm=True,
        layer_input_width=6,
        layer_input_rows=101,
        stream_scale=True,
    ),
    "latent": config_of(LatentAttention(9, 7, 6, 4, 5), ROPE),
    "latent-whole-queries": config_of(LatentAttention(None, 7, 6, 4, 10), ROPE),
    "latent-no-rope": config_of(LatentAttention(9, 7, 6, 4, 5)),
    "gated-delta": config_of(GatedDelta(2, 4, 5, 6, 4)),
    "kimi-delta": config_of(GatedDelta(4, 4, 5, 5, 3, rank=6)),
    "short-convolution": config_of(ShortConvolution(3)),
    "mamba1": config_of(Mamba1(42, 5, 7, 4)),
    "mamba2": config_of(MAMBA),
    "attention-beside-mamba2": config_of(
        AttentionBesideMamba2(dataclasses.replace(MAMBA, norm=None, taps_bias=False), 0.8, 1.2), ROPE_OF_HEADS
    ),
    "sublayers-alone": dataclasses.replace(
        config_of(MAMBA),
        layers=(
            LayerConfig(1.0, mixer=dataclasses.replace(MAMBA, norm="before_gate"), only="mixer"),
            LayerConfig(1.0, only="feed_forward"),
            dataclasses.replace(ATTENTION, only="mixer"),
        ),
    ),
}
RECURRENT = (
    "gated-delta",
    "kimi-delta",
    "short-convolution",
    "mamba1",
    "mamba2",
    "attention-beside-mamba2",
    "sublayers-alone",
)
LENGTH = 70


def parts_of(kind: str) -> tuple[Any, Any]:
    return make_policy(KINDS[kind], num_layers_unfrozen=-1), random_params(KINDS[kind])


def row(length: int = LENGTH) -> jax.Array:
    return jax.random.randint(jax.random.key(3), (length,), 2, 97)


def hidden(policy: Any, params: Any, inputs: ModelInputs) -> np.ndarray:
    return np.asarray(jax.jit(lambda p, i: policy.branch(p, {}, None, i, None).policy)(params, inputs))


def padded(pads: list[tuple[int, int]], length: int = LENGTH) -> ModelInputs:
    """The same row with so many pads on either side."""
    width = length + max(left + right for left, right in pads)
    columns = jnp.arange(width)[None] - jnp.asarray([[left] for left, _ in pads])
    mask = (columns >= 0) & (columns < length)
    return ModelInputs(jnp.where(mask, row(length)[jnp.clip(columns, 0, length - 1)], 5), mask)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_on_either_side_is_not_there(kind):
    policy, params = parts_of(kind)
    inputs = padded([(0, 63), (1, 0), (7, 3), (63, 0)])
    found, mask = hidden(policy, params, inputs), np.asarray(inputs.attention_mask)
    (wanted,) = hidden(policy, params, ModelInputs(row()[None], jnp.ones((1, LENGTH), bool)))
    assert wanted.std() > 0.1
    for index in range(4):
        np.testing.assert_allclose(found[index][mask[index]], wanted, atol=1e-5)


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_hole_in_a_row_is_not_there(kind):
    policy, params = parts_of(kind)
    mask = jnp.ones((1, LENGTH + 9), bool).at[0, 20:29].set(False)
    tokens = jnp.full((1, LENGTH + 9), 5).at[0, np.flatnonzero(mask[0])].set(row())
    found = hidden(policy, params, ModelInputs(tokens, mask))[0][np.asarray(mask[0])]
    (wanted,) = hidden(policy, params, ModelInputs(row()[None], jnp.ones((1, LENGTH), bool)))
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_segments_of_a_packed_row_are_rows(kind):
    policy, params = parts_of(kind)
    sizes = (31, 1, 33, 5)
    segments = jnp.asarray(np.repeat(np.arange(1, 5), sizes))[None]
    found = hidden(policy, params, ModelInputs(row()[None], jnp.ones((1, LENGTH), bool), segments))[0]
    for stop, size in zip(np.cumsum(sizes), sizes, strict=True):
        alone = ModelInputs(row()[None, stop - size : stop], jnp.ones((1, size), bool))
        np.testing.assert_allclose(found[stop - size : stop], hidden(policy, params, alone)[0], atol=1e-5)


def decoded(policy: Any, params: Any, inputs: ModelInputs, prompt: int, *, own: bool = False) -> Any:
    """Features of all columns, and the cache, after a prompt and single tokens."""

    @jax.jit
    def run(params: Any) -> Any:
        state = policy.init_cache(params, {}, inputs, inputs.tokens.shape[1])
        first, state = policy.decode(params, {}, jax.tree.map(lambda x: x[:, :prompt], inputs), state)
        state = policy.own_columns(state) if own else state

        def step(state: Any, column: Any) -> Any:
            features, state = policy.decode(params, {}, ModelInputs(*(x[:, None] for x in column)), state)
            return state, features.policy[:, 0]

        later = (inputs.tokens[:, prompt:].T, inputs.attention_mask[:, prompt:].T)
        state, rest = jax.lax.scan(step, state, later)
        return jnp.concatenate([first.policy, rest.swapaxes(0, 1)], axis=1), state

    return run(params)


def parts(state: Any) -> list[Any]:
    """Entries of all layers; of attention beside a recurrence both."""
    found = []
    for entry in state.layers:
        found += entry if isinstance(entry, cache_module.AttentionStateCache) else [entry]
    return found


def first_state(state: Any) -> list[Any]:
    """Arrays of the first recurrence."""
    states = [entry for entry in parts(state) if isinstance(entry, cache_module.StateCache)]
    return jax.tree.leaves(states[0])


@pytest.mark.parametrize("own", [False, True], ids=["shared columns", "own columns"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_after_64_tokens_is_that_of_a_fresh_prompt(kind, own):
    policy, params = parts_of(kind)
    inputs = padded([(0, 0), (3, 0)]) if not own else padded([(3, 0), (0, 3)])
    features, state = decoded(policy, params, inputs, LENGTH - 64 + (0 if own else 3), own=own)
    mask = np.asarray(inputs.attention_mask)
    wanted = hidden(policy, params, inputs)
    np.testing.assert_allclose(np.asarray(features)[mask], wanted[mask], atol=2e-5)

    @jax.jit
    def of_a_prompt(params: Any) -> Any:
        empty = policy.init_cache(params, {}, inputs, inputs.tokens.shape[1])
        return policy.decode(params, {}, inputs, empty)[1]

    fresh = of_a_prompt(params)
    for found, other in zip(parts(state), parts(fresh), strict=True):
        is_state = isinstance(other, cache_module.StateCache)
        if own and not is_state:
            continue  # its columns are others
        for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(other), strict=True):
            # Of columns, those of padding hold anything.
            real = np.ones(one.shape, bool) if is_state else mask[:, None, :, None] & np.ones(one.shape, bool)
            np.testing.assert_allclose(np.asarray(one)[real], np.asarray(two)[real], atol=2e-5)


@pytest.mark.parametrize("limit", [3 * 40, 90], ids=["rows", "columns"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_is_read_in_parts_is_the_prompt(kind, limit, monkeypatch):
    policy, params = parts_of(kind)
    inputs = padded([(0, 0), (11, 0), (40, 0)])
    monkeypatch.setattr(generate, "PREFILL_TOKENS", limit)
    features, _ = jax.jit(lambda p: prefill(policy, p, {}, inputs, 4))(params)
    wanted = hidden(policy, params, inputs)[:, -1]
    np.testing.assert_allclose(features.policy[:, 0], wanted, atol=1e-5)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("latent")])
@pytest.mark.parametrize("reads_slices", [True, False], ids=["one buffer", "several buffers"])
def test_latents_in_parts_are_read_as_one(kind, reads_slices, monkeypatch):
    policy, params = parts_of(kind)
    inputs = padded([(0, 0), (3, 0)], 30)
    wanted, _ = decoded(policy, params, inputs, 10)
    monkeypatch.setattr(cache_module, "READ_COLUMNS", 8)
    monkeypatch.setattr(cache_module, "reads_slices", lambda _: reads_slices)
    found, state = decoded(policy, params, inputs, 10)
    assert len(state.layers[0].latents) == (1 if reads_slices else 5)
    mask = np.asarray(inputs.attention_mask)
    np.testing.assert_allclose(np.asarray(found)[mask], np.asarray(wanted)[mask], atol=1e-5)


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_state_forgets_nothing_or_all(kind):
    policy, params = parts_of(kind)
    assert not policy.forgets_some and make_policy(BASE, num_layers_unfrozen=-1).forgets_some
    inputs = padded([(0, 0)] * 3, 12)

    @jax.jit
    def run(params: Any) -> Any:
        empty = policy.own_columns(policy.init_cache(params, {}, inputs, 24))
        return empty, policy.decode(params, {}, inputs, empty)[1]

    empty, state = run(params)
    for found, before, nothing in zip(
        first_state(policy.forget(state, jnp.array([0, 12, 3]))),
        first_state(state),
        first_state(empty),
        strict=True,
    ):
        np.testing.assert_array_equal(found[0], before[0])
        np.testing.assert_array_equal(found[1], nothing[1])
        assert np.isnan(found[2]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_decodes_near_float32(kind):
    params, inputs = random_params(KINDS[kind]), padded([(0, 0), (5, 0)], 30)
    exact = hidden(make_policy(KINDS[kind], num_layers_unfrozen=-1), params, inputs)
    policy = make_policy(KINDS[kind], num_layers_unfrozen=-1, compute_dtype=jnp.bfloat16)
    found, state = decoded(policy, policy.rounded(params), inputs, 10)
    mask = np.asarray(inputs.attention_mask)
    error = np.abs(np.asarray(found, np.float32) - exact)[mask]
    assert error.mean() < 0.03 * np.abs(exact[mask]).mean() + 0.01, error.mean()
    if kind in RECURRENT and kind != "short-convolution":
        assert first_state(state)[-1].dtype == jnp.float32


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_one_body_for_equal_layers_computes_the_same(kind):
    """With whole periods of two layers, rematerialised and not, gradients included."""
    config = dataclasses.replace(KINDS[kind], layers=KINDS[kind].layers[:2] * 2)
    params, inputs = random_params(config), padded([(0, 2), (5, 0)], 12)

    def gradient(share: bool, remat: bool) -> Any:
        policy = make_policy(config, num_layers_unfrozen=-1, share_layers=share, remat=remat)

        def loss(params: Any) -> Any:
            found = policy.branch(params, {}, None, inputs, None).policy
            return jnp.where(inputs.attention_mask[:, :, None], jnp.sin(found), 0.0).sum()

        return jax.jit(jax.grad(loss))(params)

    wanted = gradient(False, False)
    for found in (gradient(True, False), gradient(True, True)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-4), found, wanted)


def test_latent_attention_goes_through_einsums():
    assert choose_attention("auto", KINDS["latent"], jnp.bfloat16) == "einsum"
    with pytest.raises(ValueError, match="latent attention"):
        choose_attention("xla", KINDS["latent"], jnp.float32)


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_fused_kernel_serves_the_layers_of_attention(kind):
    params, inputs = random_params(KINDS[kind]), padded([(0, 5), (0, 0)], 20)
    wanted = hidden(make_policy(KINDS[kind], num_layers_unfrozen=-1), params, inputs)
    fused = make_policy(KINDS[kind], num_layers_unfrozen=-1, attn_implementation="xla")
    mask = np.asarray(inputs.attention_mask)
    np.testing.assert_allclose(hidden(fused, params, inputs)[mask], wanted[mask], atol=1e-5)


@pytest.mark.parametrize("adapter", [PrefixConfig(3), PromptConfig(3)], ids=["prefix", "prompt"])
@pytest.mark.parametrize(
    "case",
    [
        "gemma4_text",
        "qwen3_5_text",
        "deepseek_v3",
        "lfm2",
        "falcon_h1",
        "granitemoehybrid",
        "jamba",
        "nemotron_h",
    ],
)
def test_virtual_tokens_are_refused(case, adapter):
    model = CausalLM.from_config(CASES[case])
    with pytest.raises(ValueError, match="Take LoRA"):
        model.policy(adapter=adapter)


@pytest.mark.parametrize("tokens", [1, 3])
def test_rounded_kernels_wait_for_the_queries_of_their_layer(tokens):
    """Else all layers' are expanded before the loop over tokens, and lie there until its end."""
    pytest.importorskip("qwix")
    policy, inputs = make_policy(KINDS["latent"], num_layers_unfrozen=-1), padded([(0, 0)], tokens)

    def step(params: Any) -> Any:
        state = policy.init_cache(params, {}, inputs, 12)
        return policy.decode(params, {}, inputs, state)[0].policy

    rounded = jax.eval_shape(lambda: quantize_frozen(random_params(KINDS["latent"]), "int8"))
    kernels = [x for x in jax.tree.leaves(rounded, is_leaf=is_rounded) if is_rounded(x)]
    waiting = 0
    for equation in jax.make_jaxpr(step)(rounded).eqns:
        if equation.primitive.name == "optimization_barrier":
            waiting += sum(variable.aval.dtype == jnp.int8 for variable in equation.invars)
    assert waiting == len(kernels)


def is_rounded(leaf: Any) -> bool:
    return isinstance(leaf, QuantizedKernel)


def test_a_step_of_decoding_reads_adapters_of_what_it_does_not_expand():
    model = CausalLM.from_config(CASES["deepseek_v3"])
    adapter = LoraConfig(r=2, target_modules=("kv_b_proj", "q_b_proj"))
    whole = random_params(model.config)
    trainable, frozen = model.split_params(whole, adapter=adapter, key=jax.random.key(0))
    trainable = jax.tree.map(lambda x: x + 0.3, trainable)
    policy, inputs = model.policy(adapter=adapter), padded([(0, 0)], 12)

    @jax.jit
    def run(params: Any) -> Any:
        state = policy.init_cache(params, frozen, inputs, 12)
        _, state = policy.decode(params, frozen, jax.tree.map(lambda x: x[:, :11], inputs), state)
        last, _ = policy.decode(params, frozen, jax.tree.map(lambda x: x[:, 11:], inputs), state)
        trunk = policy.trunk(frozen, inputs)
        return last.policy[0, 0], policy.branch(params, frozen, trunk, inputs, None).policy[0, -1]

    found, wanted = run(trainable)
    np.testing.assert_allclose(found, wanted, atol=2e-5)
    _, without = run({name: jax.tree.map(jnp.zeros_like, tree) for name, tree in trainable.items()})
    assert np.abs(wanted - without).max() > 0.1
