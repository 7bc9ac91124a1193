# SPDX-License-Identifier: Apache-2.0
"""Real tokens first, in their order, and everything back in its place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models.recurrent_rows import recurrent_rows

MASK = np.array([[1, 1, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0]], bool)


def test_real_tokens_come_first_and_padding_is_0():
    x = jnp.arange(1.0, 21.0).reshape(5, 4, 1)
    rows = recurrent_rows(jnp.asarray(MASK))
    taken = rows.take(x)[:, :, 0]
    assert taken.tolist() == [
        [1, 2, 3, 4],
        [7, 8, 0, 0],
        [9, 10, 0, 0],
        [14, 16, 0, 0],
        [0, 0, 0, 0],
    ]
    assert rows.counts.tolist() == [4, 2, 2, 2, 0]
    back = rows.put_back(rows.take(x))
    np.testing.assert_array_equal(back, jnp.where(MASK[:, :, None], x, 0))


def test_the_gradient_comes_back_to_its_column():
    x, weights = jax.random.normal(jax.random.key(0), (2, 5, 4, 3))
    rows = recurrent_rows(jnp.asarray(MASK))
    gradient = jax.grad(lambda x: (rows.put_back(rows.take(x) * 2.0) * weights).sum())(x)
    np.testing.assert_allclose(gradient, 2.0 * weights * MASK[:, :, None], rtol=1e-6)


@pytest.mark.parametrize("columns", [1, 4])
def test_rows_in_order_already_are_not_moved(columns):
    mask = jnp.asarray(np.sort(MASK, axis=1)[:, ::-1][:, :columns])
    x = jax.random.normal(jax.random.key(0), (5, columns, 2))
    rows = recurrent_rows(mask, is_right_padded=True)
    assert rows.order is None
    np.testing.assert_array_equal(rows.take(x), jnp.where(mask[:, :, None], x, 0))
    assert rows.put_back(x) is x


def test_segments_go_with_their_tokens():
    segments = jnp.asarray([[1, 1, 2, 2], [0, 0, 1, 2], [1, 2, 0, 0], [0, 1, 0, 2], [0, 0, 0, 0]])
    rows = recurrent_rows(jnp.asarray(MASK), segments)
    assert rows.segments is not None
    assert rows.segments[:4].tolist() == [[1, 1, 2, 2], [1, 2, 0, 0], [1, 2, 0, 0], [1, 2, 0, 0]]
