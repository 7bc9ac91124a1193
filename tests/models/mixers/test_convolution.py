# SPDX-License-Identifier: Apache-2.0
"""A causal convolution against `numpy.convolve`, in parts, and over packed rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models.mixers.convolution import convolve
from jrl.models.recurrent_rows import recurrent_rows

LENGTH, CHANNELS, TAPS = 9, 3, 4


def operands() -> tuple[jax.Array, jax.Array]:
    x_key, taps_key = jax.random.split(jax.random.key(0))
    return jax.random.normal(x_key, (2, LENGTH, CHANNELS)), jax.random.normal(taps_key, (CHANNELS, TAPS))


def whole(length: int = LENGTH, rows: int = 2):
    return recurrent_rows(jnp.ones((rows, length), bool))


def test_convolve_against_numpy():
    x, taps = operands()
    found, tail = convolve(x, taps, whole())
    for row in range(2):
        for channel in range(CHANNELS):
            # NumPy turns the second operand round.
            wanted = np.convolve(x[row, :, channel], taps[channel, ::-1])[:LENGTH]
            np.testing.assert_allclose(found[row, :, channel], wanted, atol=1e-5)
    np.testing.assert_array_equal(tail, x[:, -3:])


@pytest.mark.parametrize("cut", [1, 2, 5, 8])
def test_a_tail_goes_on(cut):
    x, taps = operands()
    wanted, wanted_tail = convolve(x, taps, whole())
    first, tail = convolve(x[:, :cut], taps, whole(cut))
    second, tail = convolve(x[:, cut:], taps, whole(LENGTH - cut), tail)
    np.testing.assert_allclose(jnp.concatenate([first, second], axis=1), wanted, atol=1e-6)
    np.testing.assert_array_equal(tail, wanted_tail)


def test_a_tail_is_of_real_tokens_alone():
    x, taps = operands()
    mask = jnp.arange(LENGTH)[None] < jnp.array([[5], [1]])
    _, before = convolve(jnp.ones((2, 3, CHANNELS)), taps, whole(3))
    _, tail = convolve(x, taps, recurrent_rows(mask, is_right_padded=True), before)
    np.testing.assert_array_equal(tail[0], x[0, 2:5])
    np.testing.assert_array_equal(tail[1], jnp.concatenate([jnp.ones((2, CHANNELS)), x[1, :1]]))


def test_segments_do_not_read_each_other():
    x, taps = operands()
    segments = jnp.asarray([[1, 1, 1, 1, 2, 2, 2, 3, 3]] * 2)
    rows = recurrent_rows(jnp.ones((2, LENGTH), bool), segments)
    found, _ = convolve(x, taps, rows)
    for start, stop in ((0, 4), (4, 7), (7, 9)):
        wanted, _ = convolve(x[:, start:stop], taps, whole(stop - start))
        np.testing.assert_allclose(found[:, start:stop], wanted, atol=1e-6)


def test_more_taps_than_tokens():
    x, taps = operands()
    segments = jnp.asarray([[1, 2]] * 2)
    found, _ = convolve(x[:, :2], taps, recurrent_rows(jnp.ones((2, 2), bool), segments))
    np.testing.assert_allclose(found, x[:, :2] * taps[None, None, :, -1], atol=1e-6)
