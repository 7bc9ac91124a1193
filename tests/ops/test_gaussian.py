# SPDX-License-Identifier: Apache-2.0
"""Gaussian densities averaged over elements."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

from jrl.ops.gaussian import gaussian_kl, gaussian_logprob


def rows(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


class TestLogprob:
    def test_lore_8_8_it_is_scipys_density_averaged_over_elements(self) -> None:
        x, mean, std = rows(0, 3, 4, 4, 2), rows(1, 3, 4, 4, 2), jnp.array([0.02, 0.45, 2.0])
        wanted = norm.logpdf(x, mean, std[:, None, None, None]).mean(axis=(1, 2, 3))
        np.testing.assert_allclose(gaussian_logprob(x, mean, std), wanted, rtol=1e-5)

    def test_at_the_mean(self) -> None:
        # σ = e: −1 − ½ ln 2π = −1.9189
        found = gaussian_logprob(jnp.ones((1, 5)), jnp.ones((1, 5)), jnp.exp(jnp.ones(1)))
        np.testing.assert_allclose(found, [-1.9189385], rtol=1e-6)

    def test_its_gradient_is_the_distance_over_the_variance(self) -> None:
        x, mean, std = rows(0, 2, 6), rows(1, 2, 6), jnp.array([0.5, 2.0])
        gradient = jax.grad(lambda m: jnp.sum(gaussian_logprob(x, m, std)))(mean)
        np.testing.assert_allclose(gradient, (x - mean) / jnp.square(std)[:, None] / 6, rtol=1e-5)

    def test_a_wrong_shape_is_named(self) -> None:
        with pytest.raises(ValueError, match=r"`mean` must have shape \(2, 4\) like `x`, got \(2, 3\)"):
            gaussian_logprob.__wrapped__(jnp.zeros((2, 4)), jnp.zeros((2, 3)), jnp.ones(2))


class TestKl:
    def test_it_is_the_mean_difference_of_log_densities(self) -> None:
        # E over x ~ N(μ, σ²) of log N(x; μ) − log N(x; μ_ref), by quadrature at the nodes of Gauss and Hermite.
        nodes, weights = np.polynomial.hermite_e.hermegauss(4)
        mean, ref_mean, std = rows(0, 2, 3), rows(1, 2, 3), jnp.array([0.5, 2.0])
        expected = np.zeros(2)
        for node, weight in zip(nodes, weights / weights.sum(), strict=True):
            x = mean + std[:, None] * jnp.float32(node)
            expected += weight * np.asarray(
                gaussian_logprob(x, mean, std) - gaussian_logprob(x, ref_mean, std)
            )
        np.testing.assert_allclose(gaussian_kl(mean, ref_mean, std), expected, rtol=1e-4)

    def test_it_is_zero_at_the_same_mean_and_the_same_either_way_round(self) -> None:
        mean, ref_mean, std = rows(0, 2, 3), rows(1, 2, 3), jnp.array([0.5, 2.0])
        np.testing.assert_array_equal(gaussian_kl(mean, mean, std), [0.0, 0.0])
        np.testing.assert_array_equal(gaussian_kl(mean, ref_mean, std), gaussian_kl(ref_mean, mean, std))
