# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops import (
    geometric_clipped_ratio,
    product_ratio,
    sequence_ratio,
    sequence_token_ratio,
    token_ratio,
)

MASK = jnp.array([[True, False, True]])
NEW, OLD = jnp.array([[-1.0, jnp.nan, -2.0]]), jnp.array([[-1.3, jnp.nan, -1.9]])
A = jnp.ones((1, 3))
GEOMETRIC = partial(geometric_clipped_ratio, clip_range=0.4)
EVERY = {
    "sequence": sequence_ratio,
    "sequence_token": sequence_token_ratio,
    "product": product_ratio,
    "geometric": GEOMETRIC,
}


def read(ratio, new=NEW, old=OLD, advantages=A, mask=MASK):
    """Ratio and its gradient at the first action, as the loss calls it: zeros where masked."""
    zeroed = jnp.where(mask, new, 0.0), jnp.where(mask, old, 0.0)
    found, pull = jax.vjp(lambda x: ratio(x, zeroed[1], advantages, mask), zeroed[0])
    return np.asarray(found), np.asarray(pull(jnp.ones_like(found).at[:, 1:].set(0.0))[0])


class TestSequence:
    def test_lore_5_7_one_ratio_a_row_with_the_gradient_through_the_mean(self):
        """Log-ratios 0.3 and −0.1: s = e^0.1, and ∂s/∂ℓ = s/2 at both actions; the hole counts for neither."""
        found, gradient = read(sequence_ratio)
        np.testing.assert_allclose(found[:, [0, 2]], np.exp(0.1), rtol=1e-6)
        np.testing.assert_allclose(gradient, [[np.exp(0.1) / 2, 0.0, np.exp(0.1) / 2]], rtol=1e-6)

    def test_a_tokens_own_gradient_has_the_same_value(self):
        found, gradient = read(sequence_token_ratio)
        np.testing.assert_array_equal(found[:, [0, 2]], read(sequence_ratio)[0][:, [0, 2]])
        np.testing.assert_allclose(gradient, [[np.exp(0.1), 0.0, 0.0]], rtol=1e-6)


def test_the_product_is_that_of_all_actions():
    found, gradient = read(product_ratio)
    np.testing.assert_allclose(found[:, [0, 2]], np.exp(0.2), rtol=1e-6)
    np.testing.assert_allclose(gradient, [[np.exp(0.2), 0.0, np.exp(0.2)]], rtol=1e-6)


@pytest.mark.parametrize(
    ("sign", "mean", "open_at"),
    # Log-ratios 0.6 and −0.7 under ε 0.4: a good row is clipped above, a bad one below.
    [(1.0, (0.4 - 0.7) / 2, 2), (-1.0, (0.6 - 0.4) / 2, 0)],
)
def test_geometric_clipping_is_one_sided_by_the_sign_of_the_advantage(sign, mean, open_at):
    new = jnp.array([[-1.0, 0.0, -2.0]])
    old = new - jnp.array([[0.6, 0.0, -0.7]])
    ratio = jax.vjp(lambda x: GEOMETRIC(x, old, sign * A, MASK), new)
    np.testing.assert_allclose(ratio[0], np.exp(mean), rtol=1e-6)
    gradient = np.asarray(ratio[1](jnp.ones((1, 3)))[0])[0]
    assert gradient[open_at] > 0 and gradient[2 - open_at] == 0


@pytest.mark.parametrize("name", EVERY)
class TestEveryRatio:
    def test_equal_policies_have_ratio_exactly_one(self, name):
        found = EVERY[name](OLD.at[0, 1].set(0.0), OLD.at[0, 1].set(0.0), A, MASK)
        np.testing.assert_array_equal(found, np.ones((1, 3)))

    def test_of_one_action_it_is_the_tokens(self, name):
        mask = jnp.array([[True, False, False]])
        np.testing.assert_allclose(
            read(EVERY[name], mask=mask)[0][0, 0], read(token_ratio, mask=mask)[0][0, 0], rtol=1e-6
        )

    def test_extremes_and_empty_rows_stay_finite(self, name):
        new, old = jnp.array([[0.0, -400.0, 0.0]]), jnp.array([[-400.0, 0.0, -400.0]])
        for mask in (jnp.ones((1, 3), bool), jnp.zeros((1, 3), bool)):
            found, gradient = read(EVERY[name], new, old, mask=mask)
            assert np.isfinite(found).all() and np.isfinite(gradient).all()
