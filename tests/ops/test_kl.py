# SPDX-License-Identifier: Apache-2.0
"""The identities are checked by enumerating small vocabularies exactly, in float64."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops import (
    adaptive_kl_coef,
    gae,
    kl_k1,
    kl_k2,
    kl_k3,
    kl_k3_straight_through,
    penalize_kl,
)

THETA = np.array([0.3, -1.2, 0.8, 0.1, -0.4])
REF = np.array([-0.5, 0.9, 0.2, -0.3, 0.6])
OLD = np.array([0.6, -0.7, 0.1, 0.5, -0.2])


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def log_policy(theta) -> jax.Array:
    return jax.nn.log_softmax(jnp.asarray(theta, jnp.float64))


def exact_kl(first: jax.Array, second: jax.Array) -> jax.Array:
    return jnp.sum(jnp.exp(first) * (first - second))


def expected_gradient(estimator, *, sampler=THETA) -> jax.Array:
    """E_{a ~ sampler} ∇_θ estimator(a): the gradient goes through the term, not through the sampling."""
    probabilities = jnp.exp(log_policy(sampler))
    return jax.grad(lambda theta: jnp.sum(probabilities * estimator(log_policy(theta))))(jnp.asarray(THETA))


class TestValues:
    def test_golden(self):
        # log r = −0.5: k1 = 0.5, k2 = 0.125, k3 = e^−0.5 − 1 + 0.5; log r = 1: −1, 0.5, e − 2
        logprobs, ref_logprobs = jnp.array([-1.0, -2.0]), jnp.array([-1.5, -1.0])
        np.testing.assert_allclose(kl_k1(logprobs, ref_logprobs), [0.5, -1.0])
        np.testing.assert_allclose(kl_k2(logprobs, ref_logprobs), [0.125, 0.5])
        np.testing.assert_allclose(kl_k3(logprobs, ref_logprobs), [0.1065306597, 0.7182818285])

    def test_lore_3_1_k1_and_k3_are_unbiased_and_k2_and_k3_not_negative(self):
        policy, ref = log_policy(THETA), log_policy(REF)
        probabilities, truth = jnp.exp(policy), exact_kl(policy, ref)
        for estimator in (kl_k1, kl_k3):
            assert float(jnp.sum(probabilities * estimator(policy, ref))) == pytest.approx(
                float(truth), abs=1e-12
            )
        assert abs(float(jnp.sum(probabilities * kl_k2(policy, ref)) - truth)) > 1e-3
        assert float(jnp.min(kl_k1(policy, ref))) < 0
        assert float(jnp.min(kl_k2(policy, ref))) >= 0
        assert float(jnp.min(kl_k3(policy, ref))) >= 0

    def test_k3_is_precise_for_policies_that_nearly_agree(self):
        difference = jnp.array([1e-3, 1e-4, -1e-4, 0.0], jnp.float32)
        k3 = kl_k3(jnp.zeros(4, jnp.float32), difference)
        np.testing.assert_allclose(k3, np.square(difference) / 2, rtol=0.02)

    def test_lore_3_6_equal_policies_have_kl_exactly_zero(self):
        policy = log_policy(THETA)
        for estimator in (kl_k1, kl_k2, kl_k3, kl_k3_straight_through):
            assert not estimator(policy, policy).any()

    def test_lore_2_11_extreme_differences_stay_finite(self):
        logprobs, ref_logprobs = jnp.float32([-200.0, 0.0]), jnp.float32([0.0, -200.0])
        for estimator in (kl_k1, kl_k2, kl_k3, kl_k3_straight_through):
            value, gradient = jax.value_and_grad(lambda x, f=estimator: jnp.sum(f(x, ref_logprobs)))(logprobs)
            assert jnp.isfinite(value)
            assert jnp.isfinite(gradient).all()


class TestGradients:
    def test_lore_3_2_what_each_estimator_descends_as_a_loss(self):
        ref = log_policy(REF)
        forward = jax.grad(lambda theta: exact_kl(log_policy(theta), ref))(jnp.asarray(THETA))
        reverse = jax.grad(lambda theta: exact_kl(ref, log_policy(theta)))(jnp.asarray(THETA))
        np.testing.assert_allclose(expected_gradient(lambda x: kl_k1(x, ref)), np.zeros(5), atol=1e-9)
        np.testing.assert_allclose(expected_gradient(lambda x: kl_k2(x, ref)), forward, atol=1e-9)
        np.testing.assert_allclose(expected_gradient(lambda x: kl_k3(x, ref)), reverse, atol=1e-9)

    def test_lore_3_4_straight_through_has_the_value_of_k3_and_the_gradient_of_k2(self):
        policy, ref = log_policy(THETA), log_policy(REF)
        np.testing.assert_array_equal(kl_k3_straight_through(policy, ref), kl_k3(policy, ref))
        gradient = jax.grad(lambda x: jnp.sum(kl_k3_straight_through(x, ref)))(policy)
        np.testing.assert_allclose(gradient, jax.grad(lambda x: jnp.sum(kl_k2(x, ref)))(policy), atol=1e-12)


class TestSequenceKL:
    """Two actions of two choices each; the second choice depends on the first."""

    theta = np.array([[0.4, -0.3], [1.0, 0.2], [-0.6, 0.5]])
    ref = np.array([[-0.2, 0.3], [0.1, 0.9], [0.7, -0.8]])
    paths = np.array([[0, 0], [0, 1], [1, 0], [1, 1]])

    def trajectories(self, theta) -> jax.Array:
        """Log-probabilities (4 paths, 2 actions); row 0 is the first state, rows 1 and 2 what follows it."""
        logprobs = jax.nn.log_softmax(jnp.asarray(theta, jnp.float64), axis=-1)
        first, second = self.paths[:, 0], self.paths[:, 1]
        return jnp.stack([logprobs[0, first], logprobs[1 + first, second]], axis=1)

    def exact_gradient(self) -> jax.Array:
        def sequence_kl(theta):
            logprobs = jnp.sum(self.trajectories(theta), axis=1)
            return exact_kl(logprobs, jnp.sum(self.trajectories(self.ref), axis=1))

        return jax.grad(sequence_kl)(jnp.asarray(self.theta))

    def test_lore_3_3_k1_as_a_reward_gives_the_sequence_gradient_and_k2_as_a_loss_does_not(self):
        logprobs, ref_logprobs = self.trajectories(self.theta), self.trajectories(self.ref)
        mask, zeros = jnp.ones((4, 2), bool), jnp.zeros((4, 2))
        kl_coef = 0.7
        rewards = penalize_kl(zeros, logprobs, ref_logprobs, mask, kl_coef=kl_coef)
        returns_to_go = gae(rewards, zeros, mask, gamma=1.0, gae_lambda=1.0)
        probabilities = jnp.exp(jnp.sum(logprobs, axis=1, keepdims=True))

        def as_reward(theta):
            return -jnp.sum(probabilities * returns_to_go * self.trajectories(theta))

        def as_loss(theta):
            return kl_coef * jnp.sum(probabilities * kl_k2(self.trajectories(theta), ref_logprobs))

        truth = kl_coef * self.exact_gradient()
        np.testing.assert_allclose(jax.grad(as_reward)(jnp.asarray(self.theta)), truth, atol=1e-9)
        k2 = jax.grad(as_loss)(jnp.asarray(self.theta))
        np.testing.assert_allclose(k2[1:], truth[1:], atol=1e-9)  # no later state: the two agree
        assert float(jnp.max(jnp.abs(k2[0] - truth[0]))) > 1e-2


class TestAdaptiveKLCoef:
    def test_golden_trl(self):
        coef = jnp.array(0.2)
        for kl, expected in ((12.0, 0.201024), (3.0, 0.19999475712), (6.6, 0.20050674369822719)):
            coef = adaptive_kl_coef(coef, kl, target_kl=6.0, horizon=10000, num_rollouts=256)
            assert float(coef) == pytest.approx(expected, abs=1e-12)

    def test_golden_trlx(self):
        coef = jnp.array(0.1)
        for kl, expected in ((3.0, 0.099936), (6.6, 0.09996797952), (60.0, 0.1000319590)):
            coef = adaptive_kl_coef(coef, kl, target_kl=6.0, horizon=10000, num_rollouts=32)
            assert float(coef) == pytest.approx(expected, abs=1e-10)

    @pytest.mark.parametrize(("kl", "error"), [(12.0, 0.2), (3.0, -0.2), (6.6, 0.1), (6.0, 0.0)])
    def test_lore_3_8_closed_form_after_k_updates(self, kl, error):
        coef = jnp.array(0.2)
        for _ in range(5):
            coef = adaptive_kl_coef(coef, kl, target_kl=6.0, horizon=1000, num_rollouts=64)
        assert float(coef) == pytest.approx(0.2 * (1 + error * 64 / 1000) ** 5, rel=1e-9)

    @pytest.mark.parametrize("argument", ["target_kl", "horizon"])
    def test_set_points_must_be_positive(self, argument):
        good = {"target_kl": 6.0, "horizon": 1000}
        with pytest.raises(ValueError, match=f"`{argument}` must be > 0, got -1"):
            adaptive_kl_coef(jnp.array(0.2), 1.0, num_rollouts=1, **{**good, argument: -1})
