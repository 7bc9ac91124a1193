# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops import (
    constant_mean,
    group_token_shares,
    length_mask,
    sequence_mean,
    sequence_sum_mean,
    shared_mean,
    token_mean,
)

REDUCTIONS = [token_mean, sequence_mean, partial(constant_mean, length=1000), sequence_sum_mean]
NAMES = ["token_mean", "sequence_mean", "constant_mean", "sequence_sum_mean"]


@pytest.mark.parametrize(
    ("reduction", "shares"),
    [
        (token_mean, [10 / 1010, 1000 / 1010]),
        (sequence_mean, [0.5, 0.5]),
        (partial(constant_mean, length=1000), [10 / 2000, 1000 / 2000]),
        (sequence_sum_mean, [10 / 2, 1000 / 2]),
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


def test_empty_rows_count_where_they_are_asked_to():
    losses, mask = jnp.ones((3, 2)), jnp.array([[True, True], [True, False], [False, False]])
    given = losses, mask
    assert [float(x) for x in sequence_mean(*given, count_empty=True)] == [2.0, 3.0]
    assert [float(x) for x in sequence_sum_mean(*given, count_empty=True)] == [3.0, 3.0]
    assert [float(x) for x in constant_mean(*given, length=5, count_empty=True)] == [3.0, 15.0]


class TestShares:
    """Two prompts: one with completions of 1 and 3 actions, one with a single one of 2, and a row of padding."""

    mask = length_mask(jnp.array([1, 2, 3, 0]), width=3)
    groups = jnp.array([8, 5, 8, 5])
    losses = jnp.arange(12, dtype=jnp.float32).reshape(4, 3)

    def test_golden(self):
        shares = group_token_shares(self.mask, self.groups)
        np.testing.assert_array_equal(shares, [[0.25, 0, 0], [0.5, 0.5, 0], [0.25, 0.25, 0.25], [0, 0, 0]])
        # Means over the prompts' tokens: (0 + 6 + 7 + 8)/4 = 5.25 and (3 + 4)/2 = 3.5; their mean is 4.375.
        assert [float(x) for x in shared_mean(self.losses, self.mask, shares)] == [8.75, 2.0]

    def test_minibatches_of_split_groups_add_up(self):
        shares = group_token_shares(self.mask, self.groups)
        parts = [shared_mean(*(x[i : i + 1] for x in (self.losses, self.mask, shares))) for i in range(4)]
        assert [float(sum(part)) for part in zip(*parts, strict=True)] == [8.75, 2.0]

    def test_masked_garbage_is_irrelevant(self):
        shares = group_token_shares(self.mask, self.groups)
        dirty = [jnp.where(self.mask, x, jnp.nan) for x in (self.losses, shares)]
        assert [float(x) for x in shared_mean(dirty[0], self.mask, dirty[1])] == [8.75, 2.0]
