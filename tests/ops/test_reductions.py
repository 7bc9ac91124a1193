# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops import constant_mean, length_mask, sequence_mean, token_mean

REDUCTIONS = [token_mean, sequence_mean, partial(constant_mean, length=1000)]
NAMES = ["token_mean", "sequence_mean", "constant_mean"]


@pytest.mark.parametrize(
    ("reduction", "shares"),
    [
        (token_mean, [10 / 1010, 1000 / 1010]),
        (sequence_mean, [0.5, 0.5]),
        (partial(constant_mean, length=1000), [10 / 2000, 1000 / 2000]),
    ],
    ids=NAMES,
)
def test_lore_5_1_what_a_short_and_a_long_completion_weigh(reduction, shares):
    mask = length_mask(jnp.array([10, 1000]), width=1000)

    def loss(per_row):
        loss_sum, weight = reduction(jnp.broadcast_to(per_row[:, None], mask.shape), mask)
        return loss_sum / weight

    np.testing.assert_allclose(jax.grad(loss)(jnp.ones(2)), shares, rtol=1e-5)


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=NAMES)
class TestEveryReduction:
    losses = jnp.array([[1.0, 3.0, 5.0], [2.0, 4.0, 6.0], [7.0, 7.0, 7.0]])
    mask = jnp.array([[True, True, False], [False, True, False], [False, False, False]])

    def test_lore_1_12_a_row_without_actions_adds_nothing(self, reduction):
        loss_sum, weight = reduction(self.losses, self.mask)
        alone_sum, alone_weight = reduction(self.losses[:2], self.mask[:2])
        assert (float(loss_sum), float(weight)) == (float(alone_sum), float(alone_weight))
        nothing_sum, nothing_weight = reduction(self.losses[2:], self.mask[2:])
        assert (float(nothing_sum), float(nothing_weight)) == (0.0, 0.0)

    def test_microbatches_add_up(self, reduction):
        whole = reduction(self.losses, self.mask)
        parts = [reduction(self.losses[i : i + 1], self.mask[i : i + 1]) for i in range(3)]
        np.testing.assert_allclose(whole, [sum(part) for part in zip(*parts, strict=True)], rtol=1e-6)

    def test_masked_garbage_is_irrelevant(self, reduction):
        dirty = jnp.where(self.mask, self.losses, jnp.nan)
        np.testing.assert_array_equal(reduction(dirty, self.mask), reduction(self.losses, self.mask))


def test_golden():
    losses = jnp.array([[1.0, 3.0], [4.0, 9.0]])
    mask = jnp.array([[True, True], [True, False]])
    assert tuple(map(float, token_mean(losses, mask))) == (8.0, 3.0)
    assert tuple(map(float, sequence_mean(losses, mask))) == (6.0, 2.0)  # (1 + 3)/2 + 4
    assert tuple(map(float, constant_mean(losses, mask, length=5))) == (8.0, 10.0)
