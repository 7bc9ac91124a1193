# SPDX-License-Identifier: Apache-2.0
"""The logistic loss: by hand, at its ends, and with labels that may be wrong."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops.logistic import logistic_loss, smoothed_logistic_loss
from tests.transforms import assert_every_transform, normals_like

LOGITS = jnp.array([-3.0, 0.0, 0.5, 4.0])


def test_golden() -> None:
    # log(1 + e^-x): log(1 + e^3), log 2, log(1 + e^-0.5), log(1 + e^-4)
    expected = [math.log1p(math.exp(-x)) for x in LOGITS.tolist()]
    np.testing.assert_allclose(logistic_loss(LOGITS), expected, rtol=1e-6)
    assert float(logistic_loss(jnp.array(0.0))) == pytest.approx(math.log(2))


def test_loss_and_gradient_are_finite_at_any_logit() -> None:
    far = jnp.array([-1e30, -1e4, 1e4, 1e30])
    value, slope = jax.vmap(jax.value_and_grad(logistic_loss))(far)
    np.testing.assert_allclose(value, [1e30, 1e4, 0.0, 0.0], rtol=1e-6)
    np.testing.assert_array_equal(slope, [-1.0, -1.0, 0.0, 0.0])


def test_the_gradient_is_minus_the_probability_of_being_wrong() -> None:
    slope = jax.vmap(jax.grad(logistic_loss))(LOGITS)
    np.testing.assert_allclose(slope, -jax.nn.sigmoid(-LOGITS), rtol=1e-6)


def test_certain_labels_need_no_smoothing() -> None:
    np.testing.assert_array_equal(smoothed_logistic_loss(LOGITS, label_smoothing=0.0), logistic_loss(LOGITS))
    np.testing.assert_array_equal(smoothed_logistic_loss(LOGITS, label_smoothing=1.0), logistic_loss(-LOGITS))


def test_the_smoothed_loss_is_least_at_the_log_odds_of_a_right_label() -> None:
    # ε = 0.2: x* = log(0.8/0.2)
    slope = jax.grad(lambda x: smoothed_logistic_loss(x, label_smoothing=0.2))
    assert float(slope(jnp.log(jnp.array(4.0)))) == pytest.approx(0.0, abs=1e-7)
    assert float(slope(jnp.array(1.0))) < 0 < float(slope(jnp.array(2.0)))


def test_whole_numbers_are_refused() -> None:
    with pytest.raises(TypeError, match="`logits` must be of a float dtype, got int32"):
        logistic_loss.__wrapped__(jnp.array([1, 2]))


def test_transforms() -> None:
    assert_every_transform(
        lambda x: [logistic_loss(x), smoothed_logistic_loss(x, label_smoothing=0.1)], normals_like(LOGITS, 0)
    )
