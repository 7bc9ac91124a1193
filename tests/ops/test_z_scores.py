# SPDX-License-Identifier: Apache-2.0
"""The z-score: by hand, and the same on host and device."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jrl.ops.z_scores import z_scores

VALUES = np.array([1.0, 2.0, 6.0])


def test_golden() -> None:
    # (1 − 3)/(2 + 2), (2 − 3)/4, (6 − 3)/4
    found = z_scores(VALUES, mean=3.0, std=2.0, epsilon=2.0)
    np.testing.assert_array_equal(found, [-0.5, -0.25, 0.75])
    assert isinstance(found, np.ndarray) and found.dtype == np.float64


def test_the_scores_of_a_sample_have_mean_0_and_deviation_1() -> None:
    found = z_scores(VALUES, mean=VALUES.mean(), std=VALUES.std(), epsilon=1e-12)
    np.testing.assert_allclose([found.mean(), found.std()], [0.0, 1.0], atol=1e-11)


def test_host_and_device_agree() -> None:
    device = z_scores(jnp.asarray(VALUES), mean=jnp.array([0.0, 1.0, 2.0]), std=jnp.array(2.0), epsilon=0.5)
    host = z_scores(VALUES, mean=np.array([0.0, 1.0, 2.0]), std=2.0, epsilon=0.5)
    np.testing.assert_allclose(device, host, rtol=1e-6)
