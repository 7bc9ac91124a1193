# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops import masked_mean, masked_sum, masked_variance, whiten, zero_masked

X = jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
MASK = jnp.array([[False, True, True], [True, True, False]])
NOTHING = jnp.zeros((2, 3), bool)


class TestStatistics:
    def test_golden(self):
        # over 2, 3, 4, 5: sum 14, mean 3.5, squared deviations 2.25 + 0.25 + 0.25 + 2.25 = 5
        assert float(masked_sum(X, MASK)) == 14.0
        assert float(masked_mean(X, MASK)) == 3.5
        assert float(masked_variance(X, MASK)) == pytest.approx(5 / 3, abs=1e-6)
        assert float(masked_variance(X, MASK, ddof=0)) == 1.25

    def test_along_an_axis(self):
        assert masked_sum(X, MASK, axis=1).tolist() == [5.0, 9.0]
        assert masked_mean(X, MASK, axis=1).tolist() == [2.5, 4.5]

    def test_lore_1_12_nothing_is_zero_and_not_nan(self):
        for statistic in (masked_sum, masked_mean, masked_variance):
            value, gradient = jax.value_and_grad(statistic)(X, NOTHING)
            assert float(value) == 0.0
            np.testing.assert_array_equal(gradient, jnp.zeros_like(X))

    def test_one_value_has_no_variance(self):
        assert float(masked_variance(X, NOTHING.at[0, 0].set(True))) == 0.0

    @pytest.mark.parametrize("garbage", [jnp.nan, jnp.inf, -jnp.inf, 3e38])
    def test_masked_garbage_reaches_neither_value_nor_gradient(self, garbage):
        dirty = jnp.where(MASK, X, garbage)
        for statistic in (masked_sum, masked_mean, masked_variance):
            clean_value, clean_gradient = jax.value_and_grad(statistic)(X, MASK)
            value, gradient = jax.value_and_grad(statistic)(dirty, MASK)
            assert value == clean_value
            np.testing.assert_array_equal(gradient, clean_gradient)

    def test_bfloat16_is_summed_in_float32(self):
        ones = jnp.ones((2, 300), jnp.bfloat16)
        total = masked_sum(ones, jnp.ones((2, 300), bool))
        assert total.dtype == jnp.float32
        assert float(total) == 600.0


class TestWhiten:
    def test_golden(self):
        # deviations ±0.5, ±1.5 over the root of 5/3
        expected = [[0.0, -1.161895, -0.387298], [0.387298, 1.161895, 0.0]]
        np.testing.assert_allclose(whiten(X, MASK), expected, atol=1e-5)

    def test_the_variance_may_be_that_of_a_population(self):
        x, every = jnp.array([1.0, 2.0, 3.0, 4.0]), jnp.ones(4, bool)
        np.testing.assert_allclose(jnp.std(whiten(x, every, ddof=0)), 1.0, atol=1e-6)

    def test_without_shift_the_mean_stays(self):
        scaled = whiten(X, MASK, shift_mean=False)
        np.testing.assert_allclose(scaled, [[0.0, 2.338105, 3.112702], [3.887298, 4.661895, 0.0]], atol=1e-5)

    def test_lore_4_4_masked_statistics_centre_advantages_and_only_scale_rewards(self):
        dirty = jnp.where(MASK, X, jnp.nan)
        advantages, rewards = whiten(dirty, MASK), whiten(dirty, MASK, shift_mean=False)
        assert float(masked_mean(advantages, MASK)) == pytest.approx(0.0, abs=1e-6)
        assert float(masked_mean(rewards, MASK)) == pytest.approx(3.5, abs=1e-5)
        for whitened in (advantages, rewards):
            assert float(masked_variance(whitened, MASK)) == pytest.approx(1.0, abs=1e-5)
            np.testing.assert_array_equal(zero_masked(whitened, MASK), whitened)

    def test_few_values_are_finite(self):
        one = NOTHING.at[1, 2].set(True)
        assert not whiten(X, NOTHING).any()
        assert not whiten(X, one).any()
        assert float(whiten(X, one, shift_mean=False)[1, 2]) == 6.0

    def test_equal_values_become_zero(self):
        assert not whiten(jnp.full((2, 4), 3.0), jnp.ones((2, 4), bool)).any()

    def test_batch_order_is_irrelevant(self):
        np.testing.assert_allclose(whiten(X[::-1], MASK[::-1])[::-1], whiten(X, MASK), atol=1e-6)

    def test_no_gradient(self):
        np.testing.assert_array_equal(jax.grad(lambda x: whiten(x, MASK)[0, 1])(X), jnp.zeros_like(X))
