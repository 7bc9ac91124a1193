# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jrl.ops import gae, whiten

# trlX (utils/modeling, AcceleratePPO): two completions of 4 and 3 tokens, γ = 0.9, λ = 0.95
REWARDS = jnp.array([[0.0, 0.1, -0.2, 1.0], [0.3, -0.4, 0.5, 0.0]])
VALUES = jnp.array([[0.1, 0.2, 0.3, 0.4], [0.5, -0.1, 0.2, 0.0]])
MASK = jnp.array([[True, True, True, True], [True, True, True, False]])
ADVANTAGES = [[0.498022, 0.488915, 0.373000, 0.600000], [-0.173292, 0.136500, 0.300000, 0.0]]
RETURNS = [[0.598022, 0.688915, 0.673000, 1.000000], [0.326708, 0.036500, 0.500000, 0.0]]

jitted_gae = jax.jit(gae)


def gae_by_definition(rewards, values, mask, *, gamma, gae_lambda):
    """Σ_k (γλ)^k δ_{t+k} over the actions of a row alone, O(T²), in float64."""
    advantages = np.zeros(mask.shape)
    for row in range(mask.shape[0]):
        actions = np.flatnonzero(mask[row])
        r, v = np.float64(rewards[row, actions]), np.float64(values[row, actions])
        delta = r + gamma * np.append(v[1:], 0.0) - v
        for t, column in enumerate(actions):
            advantages[row, column] = np.sum((gamma * gae_lambda) ** np.arange(len(delta) - t) * delta[t:])
    return advantages


def random_rows(seed: int, shape: tuple[int, int] = (6, 9)):
    """Rows with holes and empty rows among them."""
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=(2, *shape)).astype(np.float32)
    mask = rng.random(shape) < rng.random((shape[0], 1))
    return jnp.asarray(rewards), jnp.asarray(values), jnp.asarray(mask)


class TestGAE:
    def test_golden(self):
        advantages = gae(REWARDS, VALUES, MASK, gamma=0.9, gae_lambda=0.95)
        np.testing.assert_allclose(advantages, ADVANTAGES, atol=1e-5)

    def test_golden_with_prompt_and_padding_columns(self):
        # TRL 0.7.1, compute_advantages, γ = 1, λ = 0.95: its returns (not whitened) at the actions
        rewards = jnp.array([[-0.04, 0.02, 0.1, 1.0, 0.04], [0.02, -0.04, -0.06, 0.02, -0.5]])
        values = jnp.array([[0.3, 0.1, 0.2, 0.4, 0.9], [0.5, 0.2, -0.1, 0.3, 0.6]])
        mask = jnp.array([[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]], bool)
        advantages = gae(rewards, values, mask, gamma=1.0, gae_lambda=0.95)
        returns = [[0, 1.0465, 1.07, 1.0, 0], [0, 0, -0.44875, -0.425, -0.5]]
        np.testing.assert_allclose(jnp.where(mask, advantages + values, 0.0), returns, atol=1e-5)
        whitened = [[0, 1.031166, 0.944102, 0.636814, 0], [0, 0, -0.442958, -0.871168, -1.297956]]
        np.testing.assert_allclose(whiten(advantages, mask), whitened, atol=1e-5)

    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 0.95), (0.9, 0.7), (1.0, 1.0), (0.9, 0.0)])
    def test_lore_4_2_equals_the_definition_over_actions(self, seed, gamma, gae_lambda):
        rows = random_rows(seed)
        expected = gae_by_definition(*map(np.asarray, rows), gamma=gamma, gae_lambda=gae_lambda)
        advantages = jitted_gae(*rows, gamma=gamma, gae_lambda=gae_lambda)
        np.testing.assert_allclose(advantages, expected, atol=1e-5)

    def test_lambda_one_is_discounted_return_minus_value(self):
        advantages = gae(REWARDS, VALUES, MASK, gamma=0.9, gae_lambda=1.0)
        first = 0.9 * 0.1 - 0.81 * 0.2 + 0.729 * 1.0
        assert float(advantages[0, 0] + VALUES[0, 0]) == pytest.approx(first, abs=1e-6)

    def test_lambda_zero_is_the_one_step_error(self):
        advantages = gae(REWARDS, VALUES, MASK, gamma=0.9, gae_lambda=0.0)
        next_values = jnp.array([[0.2, 0.3, 0.4, 0.0], [-0.1, 0.2, 0.0, 0.0]])
        np.testing.assert_allclose(advantages, REWARDS + 0.9 * next_values - VALUES, atol=1e-6)

    def test_a_hole_of_any_length_costs_no_credit(self):
        """TRL discounts at each tool token and bootstraps from 0 before the hole; here there is no hole."""
        mask = jnp.array([[True, False, False, True, True]])
        rewards = jnp.array([[0.1, 5.0, -7.0, 0.2, 1.0]])
        values = jnp.array([[0.3, 9.0, 9.0, 0.5, 0.7]])
        closed = [0, 3, 4]
        packed = gae(rewards[:, closed], values[:, closed], mask[:, closed], gamma=0.9, gae_lambda=0.8)
        advantages = gae(rewards, values, mask, gamma=0.9, gae_lambda=0.8)
        np.testing.assert_allclose(advantages[:, closed], packed, atol=1e-6)
        assert not advantages[:, 1:3].any()

    @settings(max_examples=25, deadline=None)
    @given(
        garbage=st.lists(st.sampled_from([np.nan, np.inf, -np.inf, 3e38, -1.0]), min_size=54, max_size=54),
        seed=st.integers(0, 2**16),
    )
    def test_garbage_under_mask_zero_is_irrelevant(self, garbage, seed):
        rewards, values, mask = random_rows(seed)
        noise = jnp.asarray(np.array(garbage, np.float32).reshape(mask.shape))
        dirty = jnp.where(mask, rewards, noise), jnp.where(mask, values, noise)
        clean = jitted_gae(rewards, values, mask, gamma=0.9, gae_lambda=0.95)
        np.testing.assert_array_equal(jitted_gae(*dirty, mask, gamma=0.9, gae_lambda=0.95), clean)

    def test_gradient_stays_finite_beside_garbage(self):
        dirty = jnp.where(MASK, VALUES, jnp.nan)
        gradient = jax.grad(lambda v: jnp.sum(gae(REWARDS, v, MASK, gamma=0.9, gae_lambda=0.95)))(dirty)
        assert jnp.isfinite(gradient).all()
        assert float(gradient[1, 3]) == 0.0

    def test_garbage_is_removed_and_not_computed_with(self):
        dirty = jnp.where(MASK, REWARDS, jnp.nan), jnp.where(MASK, VALUES, jnp.nan)
        with jax.debug_nans(True):
            advantages = gae(*dirty, MASK, gamma=0.9, gae_lambda=0.95)
        np.testing.assert_allclose(advantages, ADVANTAGES, atol=1e-5)

    def test_rows_are_independent(self):
        rows = random_rows(7)
        together = jitted_gae(*rows, gamma=0.9, gae_lambda=0.95)
        alone = jitted_gae(*(x[2:3] for x in rows), gamma=0.9, gae_lambda=0.95)
        np.testing.assert_allclose(together[2:3], alone, atol=1e-6)

    def test_lore_4_3_returns_are_raw_advantages_plus_old_values(self):
        returns = gae(REWARDS, VALUES, MASK, gamma=0.9, gae_lambda=0.95) + VALUES
        np.testing.assert_allclose(returns, RETURNS, atol=1e-5)
