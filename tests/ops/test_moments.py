# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops import RunningMoments, init_moments, moments_std, update_moments


def update(moments: RunningMoments, *values: float):
    return update_moments(moments, jnp.array(values), jnp.ones(len(values), bool))


class TestUpdateMoments:
    def test_golden_trlx(self):
        moments, mean, std = update(init_moments(), 1.0, 2.0, 3.0, 4.0)
        np.testing.assert_allclose([mean, std], [2.5, 1.2909944], atol=1e-6)
        np.testing.assert_allclose([*moments, moments_std(moments)], [2.5, 1.25, 4, 1.2909944], atol=1e-6)
        moments, mean, std = update(moments, 0.0, 10.0)
        np.testing.assert_allclose([mean, std], [5.0, 7.0710678], atol=1e-6)
        expected = [3.3333333, 10.5555553, 6, 3.5590260]
        np.testing.assert_allclose([*moments, moments_std(moments)], expected, atol=1e-5)

    def test_golden_trl(self):
        moments, _, _ = update(init_moments(), 1.0, 2.0, 3.0, 4.0)
        moments, mean, std = update(moments, 10.0, -2.0)
        np.testing.assert_allclose([mean, std], [4.0, 8.485281], atol=1e-5)
        np.testing.assert_allclose([*moments, moments_std(moments)], [3.0, 13.333333, 6, 4.0], atol=1e-5)

    def test_updates_equal_one_pass_over_everything(self):
        values = np.random.default_rng(0).normal(3.0, 2.0, size=60).astype(np.float32)
        moments = init_moments()
        for part in np.split(values, [7, 8, 40]):
            moments, _, _ = update(moments, *part.tolist())
        assert float(moments.mean) == pytest.approx(values.mean(), rel=1e-5)
        assert float(moments_std(moments)) == pytest.approx(values.std(ddof=1), rel=1e-5)

    def test_padded_rows_are_not_counted(self):
        padded = update_moments(
            init_moments(), jnp.array([1.0, jnp.nan, 3.0]), jnp.array([True, False, True])
        )
        np.testing.assert_allclose(
            np.hstack([*padded[0], *padded[1:]]), [2.0, 1.0, 2.0, 2.0, np.sqrt(2.0)], atol=1e-6
        )

    def test_nothing_changes_nothing(self):
        moments, _, _ = update(init_moments(), 1.0, 4.0)
        after, mean, std = update_moments(moments, jnp.ones(2), jnp.zeros(2, bool))
        np.testing.assert_array_equal(after, moments)
        assert (float(mean), float(std)) == (0.0, 0.0)


class TestMomentsStd:
    def test_without_values_scaling_is_the_identity(self):
        assert float(moments_std(init_moments())) == 1.0

    def test_one_value_has_no_spread(self):
        moments, _, std = update(init_moments(), 5.0)
        assert (float(moments_std(moments)), float(std)) == (1.0, 0.0)

    @pytest.mark.parametrize("value", [0.0, 0.1, -1234.567])
    def test_equal_values_are_not_blown_up(self, value):
        moments, _, _ = update(init_moments(), *[value] * 1000)
        assert float(moments_std(moments)) == 1.0

    def test_a_small_spread_is_a_spread(self):
        moments, _, _ = update(init_moments(), 1.0, 1.001)
        assert float(moments_std(moments)) == pytest.approx(0.001 / np.sqrt(2), rel=1e-3)
