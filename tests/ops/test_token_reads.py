# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jrl.ops.token_reads import read_tokens

PROBS = np.array([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]])


def test_by_hand():
    got = read_tokens(jnp.log(jnp.asarray(PROBS, jnp.float32)) + 3.0, jnp.array([0, 1]))
    np.testing.assert_allclose(got.logprobs, np.log([0.5, 0.2]), rtol=1e-6)
    np.testing.assert_allclose(got.entropy, -(PROBS * np.log(PROBS)).sum(axis=1), rtol=1e-6)
    np.testing.assert_allclose(got.collision, np.log((PROBS**2).sum(axis=1)), rtol=1e-5)
    np.testing.assert_allclose(got.mean_logits, np.log(PROBS).mean(axis=1) + 3, rtol=1e-5)
    assert got.is_top.tolist() == [True, False]


def test_columns_of_a_padded_vocabulary_count_nowhere():
    logits = jnp.log(jnp.asarray(PROBS, jnp.float32))
    padded = jnp.pad(logits, ((0, 0), (0, 2)), constant_values=-jnp.inf)
    for plain, wide in zip(*(read_tokens(x, jnp.array([0, 1])) for x in (logits, padded)), strict=True):
        np.testing.assert_allclose(plain, wide, rtol=1e-6)
    gradient = jax.grad(lambda x: sum(jnp.sum(y) for y in read_tokens(x, jnp.array([0, 1]))[:-1]))(padded)
    assert np.isfinite(gradient).all()


def test_only_log_probabilities_pass_a_gradient():
    def others(x):
        return sum(jnp.sum(y) for y in read_tokens(x, jnp.array([0, 1]))[1:-1])

    assert not np.any(jax.grad(others)(jnp.log(jnp.asarray(PROBS, jnp.float32))))


def test_a_tie_counts_as_top():
    assert read_tokens(jnp.zeros((1, 3)), jnp.array([2])).is_top.tolist() == [True]
