# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops import (
    clip_events,
    clipped_surrogate,
    clipped_value_loss,
    importance_ratio,
    value_clip_events,
)

EPSILON = 0.2
RATIOS = [0.1, 0.79, 0.81, 1.0, 1.19, 1.21, 5.0]


def one(x: float) -> jax.Array:
    return jnp.full((1, 1), x, jnp.float32)


class TestImportanceRatio:
    def test_lore_2_11_log_ratios_are_clamped_before_exp(self):
        new, old = jnp.array([[0.0, -200.0, -1.0]]), jnp.array([[-200.0, 0.0, -2.0]])
        ratio, gradient = jax.value_and_grad(lambda x: jnp.sum(importance_ratio(x, old)))(new)
        assert float(ratio) == pytest.approx(np.exp(20.0) + np.exp(-20.0) + np.e, rel=1e-6)
        np.testing.assert_allclose(gradient, [[0.0, 0.0, np.e]], rtol=1e-6)

    def test_equal_policies_have_ratio_exactly_one(self):
        logprobs = jnp.array([-0.1, -3.3, -87.6])
        assert importance_ratio(logprobs, logprobs).tolist() == [1.0, 1.0, 1.0]


class TestClippedSurrogate:
    def test_golden(self):
        # ρ = 1.5: A = 2 is clipped to −1.2·2, A = −2 is not, 1.5·2. ρ = 0.5: A = 2 → −0.5·2; A = −2 → 0.8·2
        ratios = jnp.array([[1.5, 1.5], [0.5, 0.5]])
        advantages = jnp.array([[2.0, -2.0], [2.0, -2.0]])
        losses = clipped_surrogate(jnp.log(ratios), jnp.zeros((2, 2)), advantages, clip_range=EPSILON)
        np.testing.assert_allclose(losses, [[-2.4, 3.0], [-1.0, 1.6]], atol=1e-6)

    @pytest.mark.parametrize("advantage", [-1.5, 0.0, 2.0])
    def test_lore_5_3_gradient_is_zero_only_where_the_table_says(self, advantage):
        for ratio in RATIOS:
            gradient = jax.grad(
                lambda x: clipped_surrogate(x, one(0.0), one(advantage), clip_range=EPSILON)[0, 0]
            )(one(np.log(ratio)))
            is_clipped = (advantage > 0 and ratio > 1 + EPSILON) or (advantage < 0 and ratio < 1 - EPSILON)
            expected = 0.0 if is_clipped else -ratio * advantage  # d(−ρA)/dlog π = −ρA
            assert float(gradient[0, 0]) == pytest.approx(expected, abs=1e-5), ratio

    def test_at_ratio_one_the_gradient_is_reinforce(self):
        logprobs, advantages = jnp.array([[-1.0, -0.2]]), jnp.array([[0.5, -3.0]])
        gradient = jax.grad(
            lambda x: jnp.sum(clipped_surrogate(x, logprobs, advantages, clip_range=EPSILON))
        )(logprobs)
        np.testing.assert_allclose(gradient, -advantages, atol=1e-6)

    def test_extreme_ratios_stay_finite(self):
        new, old, advantages = jnp.array([[200.0, -200.0]]), jnp.zeros((1, 2)), jnp.array([[-1.0, 1.0]])
        value, gradient = jax.value_and_grad(
            lambda x: jnp.sum(clipped_surrogate(x, old, advantages, clip_range=EPSILON))
        )(new)
        assert jnp.isfinite(value)
        assert jnp.isfinite(gradient).all()

    def test_clip_range_must_be_positive(self):
        with pytest.raises(ValueError, match="`clip_range` must be > 0, got 0"):
            clipped_surrogate(one(0.0), one(0.0), one(1.0), clip_range=0)


class TestClipEvents:
    def test_events_are_where_the_surrogate_has_no_gradient(self):
        for ratio, advantage in itertools.product(RATIOS, [-1.5, 2.0]):
            events = clip_events(one(np.log(ratio)), one(0.0), one(advantage), clip_range=EPSILON)
            assert bool(events.high_positive[0, 0]) == (advantage > 0 and ratio > 1.2)
            assert bool(events.low_negative[0, 0]) == (advantage < 0 and ratio < 0.8)


class TestClippedValueLoss:
    @pytest.mark.parametrize(
        ("value", "old", "target", "loss", "gradient"),
        [
            # inside ±0.2 both branches are the plain error
            (0.1, 0.0, 1.0, 0.405, -0.9),
            # moved 0.5 towards the target: the clipped error (0.2 − 1)² is the larger, no gradient
            (0.5, 0.0, 1.0, 0.32, 0.0),
            # moved 0.5 away from it: the plain error (−0.5 − 1)² is the larger, full gradient
            (-0.5, 0.0, 1.0, 1.125, -1.5),
            # overshot it: the plain error (3 − 1)² is the larger
            (3.0, 0.0, 1.0, 2.0, 2.0),
            # overshot it by less than clipping falls short of it
            (1.5, 0.0, 1.0, 0.32, 0.0),
        ],
    )
    def test_lore_4_5_the_larger_error_counts(self, value, old, target, loss, gradient):
        def objective(values):
            return clipped_value_loss(values, one(old), one(target), clip_range=EPSILON)[0, 0]

        got, slope = jax.value_and_grad(objective)(one(value))
        assert float(got) == pytest.approx(loss, abs=1e-6)
        assert float(slope[0, 0]) == pytest.approx(gradient, abs=1e-6)
        events = value_clip_events(one(value), one(old), one(target), clip_range=EPSILON)
        assert bool(events[0, 0]) == (gradient == 0.0)

    def test_an_unmoved_value_has_half_the_squared_error(self):
        values, returns = jnp.array([[0.3, -1.0]]), jnp.array([[1.0, 1.0]])
        losses = clipped_value_loss(values, values, returns, clip_range=EPSILON)
        np.testing.assert_allclose(losses, [[0.245, 2.0]], atol=1e-6)
