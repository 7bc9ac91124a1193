# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops import (
    cispo_loss,
    clipped_ratio_loss,
    dppo_kl_loss,
    dppo_tv_loss,
    ratio_clip_events,
    sapo_loss,
    vespo_loss,
)

RATIOS = np.array([1e-6, 0.1, 0.79, 0.81, 1.0, 1.19, 1.25, 1.31, 2.9, 3.1, 50.0, 1e8], np.float32)


def slopes(loss, advantage):
    """∂ℓ/∂ρ at each of `RATIOS`."""
    advantages = jnp.full(RATIOS.shape, advantage, jnp.float32)
    return np.asarray(jax.grad(lambda ratio: jnp.sum(loss(ratio, advantages)))(jnp.asarray(RATIOS)))


class TestClippedRatio:
    @pytest.mark.parametrize("advantage", [-1.5, 2.0])
    def test_clip_higher_has_no_gradient_only_where_the_table_says(self, advantage):
        found = slopes(
            lambda ratio, a: clipped_ratio_loss(ratio, a, clip_range=0.2, clip_range_high=0.28), advantage
        )
        gone = (RATIOS > 1.28) if advantage > 0 else (RATIOS < 0.8)
        np.testing.assert_array_equal(found, np.where(gone, 0.0, -advantage).astype(np.float32))

    def test_lore_5_4_a_dual_clip_bounds_the_loss_of_bad_actions(self):
        bounded = slopes(lambda ratio, a: clipped_ratio_loss(ratio, a, clip_range=0.2, dual_clip=3.0), -1.5)
        np.testing.assert_array_equal(bounded, np.where((RATIOS < 0.8) | (RATIOS > 3), 0.0, 1.5))
        losses = clipped_ratio_loss(
            jnp.asarray(RATIOS), jnp.full(RATIOS.shape, -1.5), clip_range=0.2, dual_clip=3.0
        )
        assert float(losses.max()) == 4.5
        good = slopes(lambda ratio, a: clipped_ratio_loss(ratio, a, clip_range=0.2, dual_clip=3.0), 1.5)
        np.testing.assert_array_equal(
            good, slopes(lambda ratio, a: clipped_ratio_loss(ratio, a, clip_range=0.2), 1.5)
        )

    def test_a_capped_ratio_is_a_dual_clip_of_bad_actions(self):
        both = [
            clipped_ratio_loss(jnp.asarray(RATIOS), jnp.full(RATIOS.shape, -1.5), clip_range=0.2, **cap)
            for cap in ({"max_ratio": 3.0}, {"dual_clip": 3.0})
        ]
        np.testing.assert_array_equal(*both)

    @pytest.mark.parametrize(
        ("bounds", "message"),
        [
            ({"dual_clip": 1.0}, "`dual_clip` must be > 1, got 1.0"),
            ({"max_ratio": 1.1}, r"`max_ratio` must be > 1.2, got 1.1"),
            ({"clip_range_high": 0.0}, "`clip_range_high` must be > 0"),
        ],
    )
    def test_bounds_that_bound_nothing_are_refused(self, bounds, message):
        with pytest.raises(ValueError, match=message):
            clipped_ratio_loss(jnp.ones(1), jnp.ones(1), clip_range=0.2, **bounds)

    def test_events_are_where_clip_higher_has_no_gradient(self):
        ranges = {"clip_range": 0.2, "clip_range_high": 0.28}
        for advantage in (-1.5, 2.0):
            events = ratio_clip_events(jnp.asarray(RATIOS), jnp.full(RATIOS.shape, advantage), **ranges)
            found = slopes(lambda ratio, a: clipped_ratio_loss(ratio, a, **ranges), advantage)
            np.testing.assert_array_equal(events.high_positive | events.low_negative, found == 0)


def at(loss, ratio, logprob, advantage, **options):
    """Value and ∂ℓ/∂log π of one action, its ratio fixed by the old log-probability."""
    old = jnp.full(1, logprob - np.log(ratio), jnp.float32)

    def of(logprobs):
        return loss(jnp.exp(logprobs - old), logprobs, jnp.full(1, advantage, jnp.float32), **options)[0]

    value, gradient = jax.value_and_grad(of)(jnp.full(1, logprob, jnp.float32))
    return float(value), float(gradient[0])


class TestCISPO:
    @pytest.mark.parametrize("advantage", [-1.5, 2.0])
    @pytest.mark.parametrize(("ratio", "weight"), [(0.1, 0.1), (1.0, 1.0), (1.2, 1.2), (50.0, 1.28)])
    def test_lore_5_8_every_action_keeps_a_gradient(self, ratio, weight, advantage):
        """−sg(min(ρ, 1.28))·A·log π: no region without gradient, none through the ratio."""
        value, gradient = at(cispo_loss, ratio, -0.7, advantage, clip_range_high=0.28)
        assert gradient == pytest.approx(-weight * advantage, rel=1e-5)
        assert value == pytest.approx(weight * advantage * 0.7, rel=1e-5)

    def test_a_cap_below_one_scales_every_action(self):
        """TRL's default: `epsilon_high` of 0.2 is the cap itself."""
        assert at(cispo_loss, 1.3, -0.7, 2.0, clip_range_high=-0.8)[1] == pytest.approx(-0.4, rel=1e-5)
        with pytest.raises(ValueError, match="must be > 0"):
            at(cispo_loss, 1.3, -0.7, 2.0, clip_range_high=-1.0)


class TestSAPO:
    @pytest.mark.parametrize("advantage", [-1.5, 2.0])
    def test_the_gate_falls_to_both_sides_of_one(self, advantage):
        found = slopes(lambda r, a: sapo_loss(r, a, temperature_pos=1.0, temperature_neg=1.05), advantage)
        tau = 1.0 if advantage > 0 else 1.05
        x = tau * (RATIOS.astype(float) - 1)
        wanted = -advantage / np.cosh(np.clip(x / 2, -200, 200)) ** 2  # 4·σ(1 − σ) = sech²(x/2)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-30)


def test_vespo_weighs_by_phi():
    options = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}
    assert at(vespo_loss, 1.0, -0.7, 2.0, **options)[1] == pytest.approx(-2.0, rel=1e-5)
    wanted = 1.5**2 * np.exp(3 * (1 - 1.5))
    assert at(vespo_loss, 1.5, -0.7, 2.0, **options)[1] == pytest.approx(-2 * wanted, rel=1e-5)


class TestDPPO:
    @pytest.mark.parametrize(
        ("old", "new", "advantage", "kept"),
        [
            (0.5, 0.6, 1.0, True),
            (0.5, 0.7, 1.0, False),  # rose by 0.2 > 0.15, and A would raise it further
            (0.5, 0.7, -1.0, True),  # A brings it back
            (0.5, 0.3, -1.0, False),
            (0.5, 0.3, 1.0, True),
            (1e-5, 1e-3, 1.0, True),  # a ratio of 100 that moves no mass
        ],
    )
    def test_an_action_is_dropped_where_its_probability_left_the_region_outwards(
        self, old, new, advantage, kept
    ):
        _, gradient = at(dppo_tv_loss, new / old, np.log(new), advantage, delta=0.15)
        wanted = -min(new / old, 20.0) * advantage if kept else 0.0
        assert gradient == pytest.approx(wanted, rel=1e-4)
        # KL(0.5 ‖ 0.7) = 0.087 and KL(0.5 ‖ 0.6) = 0.020 on either side of 0.05.
        _, gradient = at(dppo_kl_loss, new / old, np.log(new), advantage, delta=0.05)
        assert gradient == pytest.approx(wanted, rel=1e-4)

    @pytest.mark.parametrize("loss", [dppo_tv_loss, dppo_kl_loss])
    def test_a_certain_action_is_finite(self, loss):
        value, gradient = at(loss, 1.0, 0.0, 1.0, delta=0.15)
        assert np.isfinite(value) and gradient == -1.0
