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
from tests.models.mixers.recurrences import (
    assert_segments_begin_anew,
    assert_two_parts_are_the_rows,
    by_steps,
    part,
)

B, N, K, V = 2, 3, 5, 7
both = pytest.mark.parametrize("by_channel", [False, True], ids=["by head", "by channel"])


def random_inputs(length: int, *, seed: int = 0, alike: float = 0.0, by_channel: bool = False) -> DeltaInputs:
    """Unit keys, of which each is `alike` the first; slow and fast decays."""
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, B, length, N, K))
    k = (1 - alike) * k + alike * k[:, :1]
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.normal(size=(B, length, N, V))
    log_decay = -rng.exponential(size=(B, length, N)) * np.array([0.01, 0.5, 5.0])
    if by_channel:
        log_decay = log_decay[..., None] * np.array([0.0, 0.1, 1.0, 3.0, 60.0])
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


@both
@pytest.mark.parametrize("length", [1, 5, CHUNK, CHUNK + 1, 2 * CHUNK + 9])
def test_rows_follow_the_definition(length, by_channel):
    inputs, state = random_inputs(length, by_channel=by_channel), random_state()
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


def token_by_token(inputs: DeltaInputs, state: Any) -> Any:
    return by_steps(delta_step, inputs, state)


@both
def test_steps_agree_with_rows(by_channel):
    inputs, state = random_inputs(CHUNK + 7, by_channel=by_channel), random_state()
    read, after = token_by_token(inputs, state)
    wanted, wanted_after = delta_rows(inputs, state)
    np.testing.assert_allclose(read, wanted, atol=1e-5)
    np.testing.assert_allclose(after, wanted_after, atol=1e-5)


@both
def test_rows_in_two_parts_are_the_rows(by_channel):
    inputs = random_inputs(CHUNK + 20, by_channel=by_channel)
    assert_two_parts_are_the_rows(delta_rows, inputs, random_state(), atol=1e-5)


@both
def test_tokens_without_rate_and_decay_are_not_there(by_channel):
    inputs, state = random_inputs(20, by_channel=by_channel), random_state()
    nothing = jnp.arange(20)[None, :, None] >= 12
    padded = inputs._replace(
        log_decay=jnp.where(nothing[..., None] if by_channel else nothing, 0.0, inputs.log_decay),
        rate=jnp.where(nothing, 0.0, inputs.rate),
    )
    _, wanted = delta_rows(part(inputs, 0, 12), state)
    np.testing.assert_allclose(delta_rows(padded, state)[1], wanted, atol=1e-6)


@both
def test_segments_begin_anew_within_chunks_and_at_their_borders(by_channel):
    inputs = random_inputs(2 * CHUNK + 30, by_channel=by_channel)
    assert_segments_begin_anew(delta_rows, inputs, jnp.zeros((B, N, K, V)), atol=1e-5)


@both
@pytest.mark.parametrize("length", [13, CHUNK + 9])
def test_gradients_are_those_of_the_steps(length, by_channel):
    """Which are taken in float64."""
    inputs, state = random_inputs(length, by_channel=by_channel), random_state()
    weights = np.random.default_rng(1).normal(size=(B, length, N, V))

    def gradient(f: Any, dtype: Any) -> Any:
        arguments = jax.tree.map(lambda x: jnp.asarray(x, dtype), (inputs, state))
        return jax.jit(jax.grad(lambda *args: (f(*args)[0] * weights.astype(dtype)).sum(), (0, 1)))(
            *arguments
        )

    found = gradient(delta_rows, np.float32)
    with jax.enable_x64():
        wanted = jax.device_get(gradient(token_by_token, np.float64))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5), found, wanted)
    assert all(float(jnp.abs(leaf).max()) > 0.1 for leaf in jax.tree.leaves(found))


@jax.jit
def squares_gradient(inputs: DeltaInputs) -> DeltaInputs:
    return jax.grad(lambda x: jnp.square(delta_rows(x, random_state())[0]).sum())(inputs)


@pytest.mark.parametrize("fast", [1.0, 30.0, 1000.0])
def test_channels_that_forget_at_once_stand_beside_some_that_never_do(fast):
    """No factor overflows, and the digits of slow channels are not lost among the fast ones."""
    rng = np.random.default_rng(2)
    slow = random_inputs(CHUNK + 5)
    pattern = rng.permuted(np.tile([0.0, 1e-3, 0.1, 1.0, fast], (B, CHUNK + 5, N, 1)), axis=-1)
    inputs = slow._replace(log_decay=jnp.asarray(-pattern, jnp.float32))
    read, after = jax.jit(delta_rows)(inputs, random_state())
    wanted, wanted_after = by_definition(inputs, random_state())
    np.testing.assert_allclose(read, wanted, atol=2e-6)
    np.testing.assert_allclose(after, wanted_after, atol=2e-6)
    assert all(np.isfinite(leaf).all() for leaf in squares_gradient(inputs))


def test_channels_that_decay_alike_are_a_head():
    inputs, state = random_inputs(2 * CHUNK + 9), random_state()
    alike = inputs._replace(log_decay=jnp.repeat(inputs.log_decay[..., None], K, axis=-1))
    segments = jnp.broadcast_to(jnp.arange(2 * CHUNK + 9)[None] // 50, (B, 2 * CHUNK + 9))
    for ids in (None, segments):
        for found, wanted in zip(delta_rows(alike, state, ids), delta_rows(inputs, state, ids), strict=True):
            np.testing.assert_allclose(found, wanted, atol=1e-5)
    first, second = (DeltaInputs(*(x[:, :1] for x in each)) for each in (alike, inputs))
    jax.tree.map(np.testing.assert_array_equal, delta_step(first, state), delta_step(second, state))


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
