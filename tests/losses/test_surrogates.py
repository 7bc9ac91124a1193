# SPDX-License-Identifier: Apache-2.0
"""Each surrogate is its op with the numbers bound: the arithmetic is tested beside the ops."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from jrl import losses, ops
from jrl.losses import Surrogate

LOGPROBS = jnp.array([[-0.2, -1.5, -0.7], [-2.0, -0.1, -3.0]])
RATIO = jnp.array([[0.3, 1.0, 1.7], [0.8, 2.5, 1.1]])
ADVANTAGES = jnp.array([[1.5, -2.0, 0.5], [-1.0, 2.0, -0.25]])


@pytest.mark.parametrize(
    ("surrogate", "op"),
    [
        (losses.plain_ratio(), lambda ratio, _, advantages: -ratio * advantages),
        (losses.cispo(clip_range_high=0.28), lambda *arrays: ops.cispo_loss(*arrays, clip_range_high=0.28)),
        (
            losses.sapo(temperature_pos=1.0, temperature_neg=1.5),
            lambda ratio, _, advantages: ops.sapo_loss(
                ratio, advantages, temperature_pos=1.0, temperature_neg=1.5
            ),
        ),
        (
            losses.vespo(k_pos=2.0, lambda_pos=3.0, k_neg=3.5, lambda_neg=2.5),
            lambda *arrays: ops.vespo_loss(*arrays, k_pos=2.0, lambda_pos=3.0, k_neg=3.5, lambda_neg=2.5),
        ),
        (
            losses.dppo_tv(delta=0.1, delta_high=0.3),
            lambda *arrays: ops.dppo_tv_loss(*arrays, delta=0.1, delta_high=0.3),
        ),
        (
            losses.dppo_kl(delta=0.1, delta_high=0.3),
            lambda *arrays: ops.dppo_kl_loss(*arrays, delta=0.1, delta_high=0.3),
        ),
    ],
)
def test_each_equals_its_op(surrogate: Surrogate, op: Callable[..., Array]) -> None:
    def with_slope(function: Callable[..., Array]) -> tuple[Array, ...]:
        found = function(RATIO, LOGPROBS, ADVANTAGES)
        slopes = jax.grad(lambda *x: jnp.sum(function(*x, ADVANTAGES)), argnums=(0, 1))(RATIO, LOGPROBS)
        return (found, *slopes)

    for found, wanted in zip(with_slope(surrogate.losses), with_slope(op), strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert surrogate.clip_range is None and surrogate.clip_range_high is None
