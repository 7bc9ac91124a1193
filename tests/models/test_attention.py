# SPDX-License-Identifier: Apache-2.0
"""Positions, packed rows and rotary angles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models.cache import cached_kv_heads
from jrl.models.config import LinearRopeScaling, Llama3RopeScaling, Rope
from jrl.models.model import CausalLM
from jrl.models.positions import Rotation, rotate, token_positions
from jrl.typing import ModelInputs
from tests.tiny import tiny_hf_config, tiny_lm, tiny_policy


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ([1, 1, 1, 1], [0, 1, 2, 3]),
        ([0, 0, 1, 1], [0, 0, 0, 1]),
        ([1, 1, 0, 0], [0, 1, 1, 1]),
        ([0, 0, 0, 0], [0, 0, 0, 0]),
    ],
)
def test_positions_count_real_tokens(mask, expected):
    assert token_positions(jnp.array([mask], bool)).tolist() == [expected]


def test_positions_restart_in_every_segment():
    mask = jnp.array([[0, 1, 1, 1, 1, 1, 0]], bool)
    segments = jnp.array([[0, 0, 0, 1, 1, 2, 2]])
    assert token_positions(mask, segments).tolist() == [[0, 0, 1, 0, 1, 0, 0]]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_lore_1_2_left_padding_keeps_positions(family):
    lm, params = tiny_lm(family)
    prompt = jnp.arange(10, 17)
    pads = (0, 1, 7, 63)
    width = max(pads) + len(prompt)
    columns = jnp.stack([jnp.arange(width) - pad for pad in pads])
    mask = (columns >= 0) & (columns < len(prompt))
    tokens = jnp.where(mask, prompt[jnp.clip(columns, 0, len(prompt) - 1)], 0)
    logprobs = jax.nn.log_softmax(jax.jit(lm.logits)(params, tokens, mask))
    rows = jnp.stack([logprobs[row, pad : pad + len(prompt)] for row, pad in enumerate(pads)])
    np.testing.assert_allclose(rows[1:], jnp.broadcast_to(rows[:1], rows[1:].shape), atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_depends_on_distance_only(interleaved):
    # ⟨R_m q, R_n k⟩ is a function of m − n: shifting both by 13 changes nothing.
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))
    frequencies = jnp.asarray(Rope(10000.0).frequencies(8))

    def turned(x, position):
        angles = (position * frequencies)[None, None]
        return rotate(x, Rotation(jnp.cos(angles), jnp.sin(angles)), interleaved=interleaved)

    def product(m, n):
        return jnp.sum(turned(q, m) * turned(k, n))

    np.testing.assert_allclose(product(5.0, 2.0), product(18.0, 15.0), atol=1e-5)
    assert abs(float(product(5.0, 2.0) - product(6.0, 2.0))) > 1e-3


def test_linear_scaling_divides_frequencies():
    plain = Rope(10000.0).frequencies(8)
    np.testing.assert_allclose(Rope(10000.0, LinearRopeScaling(4.0)).frequencies(8), plain / 4, rtol=1e-6)


def test_llama3_scaling_keeps_short_and_stretches_long_wavelengths():
    plain = Rope(500000.0).frequencies(128)
    scaled = Rope(500000.0, Llama3RopeScaling(8.0, 1.0, 4.0, 8192)).frequencies(128)
    wavelengths = 2 * np.pi / plain
    short, long = wavelengths < 8192 / 4, wavelengths > 8192 / 1
    np.testing.assert_allclose(scaled[short], plain[short], rtol=1e-6)
    np.testing.assert_allclose(scaled[long], plain[long] / 8, rtol=1e-6)
    between = ~short & ~long
    assert (
        between.any()
        and (scaled[between] < plain[between]).all()
        and (scaled[between] > plain[between] / 8).all()
    )


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_packed_segments_equal_separate_rows(family):
    policy, params, frozen, _ = tiny_policy(family, 1)

    @jax.jit
    def hidden(tokens, mask, segments):
        inputs = ModelInputs(tokens, mask, segments)
        return policy.branch(params, frozen, policy.trunk(frozen, inputs), inputs, None).policy

    first, second = jnp.array([5, 6, 7, 8]), jnp.array([50, 51, 52])
    packed = jnp.concatenate([first, second])[None]
    together = hidden(packed, jnp.ones((1, 7), bool), jnp.array([[0, 0, 0, 0, 1, 1, 1]]))
    apart = hidden(
        jnp.stack([jnp.pad(first, (0, 3)), jnp.pad(second, (0, 4))]),
        jnp.array([[1] * 4 + [0] * 3, [1] * 3 + [0] * 4], bool),
        jnp.zeros((2, 7), jnp.int32),
    )
    np.testing.assert_allclose(together[0, :4], apart[0, :4], atol=1e-5)
    np.testing.assert_allclose(together[0, 4:], apart[1, :3], atol=1e-5)


def test_kv_heads_are_not_repeated_without_a_mesh():
    config = CausalLM.from_config(tiny_hf_config("llama")).config
    assert cached_kv_heads(config.num_heads, config.num_kv_heads) == config.num_kv_heads == 2
