# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule: chunks agree with the recurrence token by token, and states with what they stand for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models.mixers.chunks import CHUNK
from jrl.models.mixers.delta_rule import DeltaInputs, delta_rows, delta_step, unit_lower_inverse

B, N, K, V = 2, 3, 5, 7


def random_inputs(length: int, *, seed: int = 0, alike: float = 0.0) -> DeltaInputs:
    """Unit keys, of which each is `alike` the first; slow and fast decays."""
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, B, length, N, K))
    k = (1 - alike) * k + alike * k[:, :1]
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.normal(size=(B, length, N, V))
    log_decay = -rng.exponential(size=(B, length, N)) * np.array([0.01, 0.5, 5.0])
    rate = rng.uniform(size=(B, length, N))
    return DeltaInputs(*(jnp.asarray(x, jnp.float32) for x in (q, k, v, log_decay, rate)))


def by_definition(inputs: DeltaInputs, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rule with matrices, in float64: S ← α S (I − β k kᵀ) + β v kᵀ, as the paper writes it (its S is turned)."""
    q, k, v, log_decay, rate = (np.asarray(x, np.float64) for x in inputs)
    state = np.array(state, np.float64)
    read = np.zeros(v.shape)
    for b in range(v.shape[0]):
        for n in range(v.shape[2]):
            matrix = state[b, n].T
            for t in range(v.shape[1]):
                key, beta = k[b, t, n], rate[b, t, n]
                matrix = np.exp(log_decay[b, t, n]) * matrix @ (np.eye(len(key)) - beta * np.outer(key, key))
                matrix = matrix + beta * np.outer(v[b, t, n], key)
                read[b, t, n] = matrix @ q[b, t, n]
            state[b, n] = matrix.T
    return read, state


def random_state() -> Any:
    return jax.random.normal(jax.random.key(9), (B, N, K, V))


@pytest.mark.parametrize("length", [1, 5, CHUNK, CHUNK + 1, 2 * CHUNK + 9])
def test_rows_follow_the_definition(length):
    inputs, state = random_inputs(length), random_state()
    read, after = jax.jit(delta_rows)(inputs, state)
    wanted, wanted_after = by_definition(inputs, state)
    np.testing.assert_allclose(read, wanted, atol=2e-5)
    np.testing.assert_allclose(after, wanted_after, atol=2e-5)


def test_keys_that_are_all_alike_lose_no_digits():
    inputs = random_inputs(CHUNK, alike=1.0)._replace(
        rate=jnp.full((B, CHUNK, N), 0.999), log_decay=jnp.zeros((B, CHUNK, N))
    )
    np.testing.assert_allclose(
        delta_rows(inputs, random_state())[0], by_definition(inputs, random_state())[0], atol=2e-5
    )


def test_steps_agree_with_rows():
    inputs, state = random_inputs(CHUNK + 7), random_state()

    def step(state: Any, column: Any) -> Any:
        read, state = delta_step(DeltaInputs(*(x[:, None] for x in column)), state)
        return state, read[:, 0]

    after, read = jax.lax.scan(step, state, DeltaInputs(*(x.swapaxes(0, 1) for x in inputs)))
    wanted, wanted_after = delta_rows(inputs, state)
    np.testing.assert_allclose(read.swapaxes(0, 1), wanted, atol=1e-5)
    np.testing.assert_allclose(after, wanted_after, atol=1e-5)


def test_rows_in_two_parts_are_the_rows():
    inputs, state = random_inputs(CHUNK + 20), random_state()
    wanted, wanted_after = delta_rows(inputs, state)
    first, middle = delta_rows(DeltaInputs(*(x[:, :37] for x in inputs)), state)
    second, after = delta_rows(DeltaInputs(*(x[:, 37:] for x in inputs)), middle)
    np.testing.assert_allclose(jnp.concatenate([first, second], axis=1), wanted, atol=1e-5)
    np.testing.assert_allclose(after, wanted_after, atol=1e-5)


def test_tokens_without_rate_and_decay_are_not_there():
    inputs, state = random_inputs(20), random_state()
    nothing = jnp.arange(20)[None, :, None] >= 12
    padded = inputs._replace(
        log_decay=jnp.where(nothing, 0.0, inputs.log_decay), rate=jnp.where(nothing, 0.0, inputs.rate)
    )
    _, wanted = delta_rows(DeltaInputs(*(x[:, :12] for x in inputs)), state)
    np.testing.assert_allclose(delta_rows(padded, state)[1], wanted, atol=1e-6)


def test_segments_begin_anew_within_chunks_and_at_their_borders():
    inputs = random_inputs(2 * CHUNK + 30)
    starts = [0, 11, CHUNK, CHUNK + 1, 2 * CHUNK - 3]
    segments = jnp.sum(jnp.arange(2 * CHUNK + 30)[None] >= jnp.asarray(starts)[:, None], axis=0)
    zero = jnp.zeros((B, N, K, V))
    read, _ = delta_rows(inputs, zero, jnp.broadcast_to(segments, (B, 2 * CHUNK + 30)))
    for start, stop in zip(starts, [*starts[1:], 2 * CHUNK + 30], strict=True):
        wanted, _ = delta_rows(DeltaInputs(*(x[:, start:stop] for x in inputs)), zero)
        np.testing.assert_allclose(read[:, start:stop], wanted, atol=1e-5)


def test_gradients_are_those_of_the_steps():
    inputs, weights = random_inputs(13), jax.random.normal(jax.random.key(1), (B, 13, N, V))

    def of_rows(inputs: DeltaInputs, state: Any) -> Any:
        return (delta_rows(inputs, state)[0] * weights).sum()

    def of_steps(inputs: DeltaInputs, state: Any) -> Any:
        def step(state: Any, column: Any) -> Any:
            read, state = delta_step(DeltaInputs(*(x[:, None] for x in column)), state)
            return state, read[:, 0]

        read = jax.lax.scan(step, state, DeltaInputs(*(x.swapaxes(0, 1) for x in inputs)))[1]
        return (read.swapaxes(0, 1) * weights).sum()

    found, wanted = (jax.jit(jax.grad(f, (0, 1)))(inputs, random_state()) for f in (of_rows, of_steps))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, wanted)
    assert all(float(jnp.abs(leaf).max()) > 0.1 for leaf in jax.tree.leaves(found))


@pytest.mark.parametrize("size", [1, 2, 13, 64])
def test_unit_lower_inverse(size):
    # All −1 is the hardest: the powers of such a matrix grow to 1e18 before they vanish.
    for lower in (
        np.tril(-np.ones((size, size), np.float32), -1) * 0.5,
        np.tril(np.ones((size, size), np.float32), -1),
    ):
        found = unit_lower_inverse(jnp.asarray(lower)[None])[0]
        wanted = np.linalg.inv(np.eye(size) + lower.astype(np.float64))
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
