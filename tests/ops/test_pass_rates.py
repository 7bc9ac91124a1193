# SPDX-License-Identifier: Apache-2.0
"""pass@k against hand-made values, against counting, and against the biased estimators."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops.pass_rates import pass_at_k


class TestPassAtK:
    def test_lore_9_3_golden(self):
        # n = 5, k = 2: 1 − C(4,2)/C(5,2) = 1 − 6/10; 1 − 3/10; 1 − 1/10; then fewer than two are wrong.
        found = pass_at_k(jnp.arange(6), num_samples=5, k=2)
        np.testing.assert_allclose(found, [0.0, 0.4, 0.7, 0.9, 1.0, 1.0], atol=1e-7)

    def test_lore_9_3_is_the_share_of_subsets_with_a_correct_sample(self):
        for n, c, k in [(6, 2, 3), (7, 1, 7), (8, 5, 2), (8, 5, 4)]:
            is_correct = [True] * c + [False] * (n - c)
            counted = np.mean([any(subset) for subset in itertools.combinations(is_correct, k)])
            assert float(pass_at_k(jnp.array([c]), num_samples=n, k=k)[0]) == pytest.approx(counted, abs=1e-6)

    def test_lore_9_3_is_unbiased(self):
        """Its mean over binomial c is 1 − (1 − p)^k exactly; the plug-in estimate's is not."""
        n, k, p = 10, 4, 0.3
        weights = np.array([math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)])
        exact = 1 - (1 - p) ** k
        assert weights @ np.asarray(pass_at_k(jnp.arange(n + 1), num_samples=n, k=k)) == pytest.approx(
            exact, abs=1e-6
        )
        plug_in = 1 - (1 - np.arange(n + 1) / n) ** k
        assert abs(weights @ plug_in - exact) > 0.02

    def test_ends(self):
        correct = jnp.arange(8)
        np.testing.assert_allclose(pass_at_k(correct, num_samples=7, k=1), np.arange(8) / 7, atol=1e-6)
        np.testing.assert_array_equal(pass_at_k(correct, num_samples=7, k=7), np.arange(8) > 0)

    def test_many_samples_do_not_overflow(self):
        found = pass_at_k(jnp.array([1, 500, 999]), num_samples=1000, k=100)
        wrong = [math.comb(1000 - c, 100) / math.comb(1000, 100) for c in (1, 500, 999)]
        np.testing.assert_allclose(found, 1 - np.array(wrong), rtol=1e-5)

    def test_jit_is_eager(self):
        correct = jnp.arange(6)
        np.testing.assert_array_equal(
            jax.jit(lambda c: pass_at_k(c, num_samples=5, k=3))(correct),
            pass_at_k(correct, num_samples=5, k=3),
        )

    @pytest.mark.parametrize("wrong", [-1, 6])
    def test_more_correct_than_samples_is_refused(self, wrong):
        with pytest.raises(
            ValueError, match=rf"`num_correct` must be in \[0, num_samples\] = \[0, 5\], got {wrong}"
        ):
            pass_at_k(jnp.array([0, 5, wrong]), num_samples=5, k=2)

    @pytest.mark.parametrize("k", [0, 6])
    def test_k_beyond_the_samples_is_refused(self, k):
        with pytest.raises(ValueError, match=rf"`k` must be in \[1, num_samples\] = \[1, 5\], got {k}"):
            pass_at_k(jnp.array([1]), num_samples=5, k=k)
