# SPDX-License-Identifier: Apache-2.0
"""NEFTune: how large the noise is, who sees it, and what it does not depend on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models.adapters.config import LoraConfig
from jrl.models.model import make_model
from jrl.models.noise import EmbeddingNoise
from tests.tiny import tiny_hf_config, tiny_lm, tiny_prompts

KEY = jax.random.key(3)
TOKENS = jnp.arange(24, dtype=jnp.int32).reshape(3, 8)


class TestMagnitude:
    @pytest.mark.parametrize(("alpha", "length", "width"), [(5.0, 128, 32), (15.0, 8, 64)])
    def test_it_fills_the_interval_of_the_paper(self, alpha, length, width):
        tokens = jnp.arange(16 * length, dtype=jnp.int32).reshape(16, length)
        noise = np.asarray(EmbeddingNoise(alpha)(KEY, tokens, width), np.float64)
        limit = alpha / np.sqrt(length * width)
        assert np.abs(noise).max() <= limit
        # Uniform in ±limit: mean 0, variance limit²/3, within five standard errors.
        count = noise.size
        assert abs(noise.mean()) < 5 * limit / np.sqrt(3 * count)
        assert abs(noise.var() - limit**2 / 3) < 5 * limit**2 * np.sqrt(4 / 45 / count)

    def test_every_entry_has_its_own(self):
        noise = np.asarray(EmbeddingNoise(1.0)(KEY, TOKENS, 4))
        assert np.unique(noise).size == noise.size


class TestWhatItFollowsFrom:
    def test_lore_5_2_a_row_keeps_its_noise_in_any_batch(self):
        noise = EmbeddingNoise(5.0)
        whole = noise(KEY, TOKENS, 4)
        np.testing.assert_array_equal(noise(KEY, TOKENS[1:2], 4), whole[1:2])
        np.testing.assert_array_equal(noise(KEY, TOKENS[::-1], 4), whole[::-1])

    def test_another_step_has_another(self):
        noise = EmbeddingNoise(5.0)
        assert not np.array_equal(noise(KEY, TOKENS, 4), noise(jax.random.key(4), TOKENS, 4))

    def test_rows_that_differ_in_one_place_differ(self):
        twice = jnp.stack([TOKENS[0], TOKENS[0].at[7].set(99)])
        one, other = EmbeddingNoise(5.0)(KEY, twice, 4)
        assert not np.array_equal(one, other)


@pytest.fixture(scope="module")
def dropping():
    """A model whose dropout would be loud."""
    lm = make_model(tiny_hf_config("gpt2", 1, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5))
    return lm, lm.init(jax.random.key(0))


def hidden(policy, params, inputs, key, frozen=None):
    frozen = {} if frozen is None else frozen
    return np.asarray(policy.branch(params, frozen, policy.trunk(frozen, inputs), inputs, key).policy)


class TestPolicy:
    def test_only_a_pass_with_a_key_sees_it(self):
        lm, params = tiny_lm()
        inputs = tiny_prompts()
        plain, noisy = lm.policy(), lm.policy(noise=EmbeddingNoise(5.0))
        np.testing.assert_array_equal(
            hidden(noisy, params, inputs, None), hidden(plain, params, inputs, None)
        )
        assert not np.allclose(
            hidden(noisy, params, inputs, KEY), hidden(plain, params, inputs, KEY), atol=1e-3
        )

    def test_sampling_never_sees_it(self):
        lm, params = tiny_lm()
        inputs, found = tiny_prompts(), []
        for policy in (lm.policy(), lm.policy(noise=EmbeddingNoise(5.0))):
            cache = policy.init_cache(params, {}, inputs, 8)
            found.append(policy.decode(params, {}, inputs, cache)[0].policy)
        np.testing.assert_array_equal(*found)

    def test_alone_it_is_all_that_the_key_draws(self, dropping):
        lm, params = dropping
        calm = make_model(tiny_hf_config("gpt2", 1))
        inputs, noise = tiny_prompts(), EmbeddingNoise(5.0)
        found = hidden(lm.policy(noise=noise), params, inputs, KEY)
        np.testing.assert_allclose(found, hidden(calm.policy(noise=noise), params, inputs, KEY), atol=1e-6)
        louder = hidden(lm.policy(noise=EmbeddingNoise(5.0, alone=False)), params, inputs, KEY)
        assert not np.allclose(found, louder, atol=1e-3)

    @pytest.mark.parametrize(
        "split", [{"num_layers_unfrozen": 1}, {"adapter": LoraConfig(layers_to_transform=[1])}]
    )
    def test_it_reaches_the_embedding_below_frozen_layers(self, split):
        lm, params = tiny_lm()
        trainable, frozen = lm.split_params(params, key=KEY, **split)
        plain, noisy = lm.policy(**split), lm.policy(noise=EmbeddingNoise(5.0), **split)
        inputs = tiny_prompts()
        assert plain.trunk(frozen, inputs) is not None and noisy.trunk(frozen, inputs) is None
        calm = hidden(plain, trainable, inputs, None, frozen)
        np.testing.assert_allclose(hidden(noisy, trainable, inputs, None, frozen), calm, atol=1e-5)
        assert not np.allclose(hidden(noisy, trainable, inputs, KEY, frozen), calm, atol=1e-3)


def test_a_seq2seq_model_refuses_it():
    with pytest.raises(ValueError, match="`neftune_noise_alpha` must be None for a seq2seq model"):
        tiny_lm("t5")[0].policy(noise=EmbeddingNoise(5.0))
