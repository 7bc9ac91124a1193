# SPDX-License-Identifier: Apache-2.0
"""The state space of Mamba-2: chunks agree with the recurrence token by token, and with matrices in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models.mixers.chunks import CHUNK
from jrl.models.mixers.state_space import StateSpaceInputs, state_space_rows, state_space_step
from tests.models.mixers.recurrences import (
    assert_segments_begin_anew,
    assert_two_parts_are_the_rows,
    by_steps,
    part,
)

B, N, G, K, V = 2, 6, 2, 5, 7


def random_inputs(length: int, *, seed: int = 0) -> StateSpaceInputs:
    """Slow and fast decays; the three heads of a group differ."""
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, B, length, G, K))
    v = rng.normal(size=(B, length, N, V))
    log_decay = -rng.exponential(size=(B, length, N)) * np.array([0.0, 0.01, 0.1, 0.5, 5.0, 50.0])
    return StateSpaceInputs(*(jnp.asarray(x, jnp.float32) for x in (q, k, v, log_decay)))


def by_definition(inputs: StateSpaceInputs, state: Any) -> tuple[np.ndarray, np.ndarray]:
    """The paper's h ← exp(Δ A) h + (Δ x) Bᵀ and y = h C, head by head in float64; its h is S turned."""
    c, b, x, log_decay = (np.asarray(part, np.float64) for part in inputs)
    state = np.array(state, np.float64)
    read = np.zeros(x.shape)
    for row in range(x.shape[0]):
        for head in range(N):
            group, h = head // (N // G), state[row, head].T
            for t in range(x.shape[1]):
                h = np.exp(log_decay[row, t, head]) * h + np.outer(x[row, t, head], b[row, t, group])
                read[row, t, head] = h @ c[row, t, group]
            state[row, head] = h.T
    return read, state


def token_by_token(inputs: StateSpaceInputs, state: Any) -> Any:
    return by_steps(state_space_step, inputs, state)


def random_state() -> Any:
    return jax.random.normal(jax.random.key(9), (B, N, K, V))


@pytest.mark.parametrize("compute", [state_space_rows, token_by_token], ids=["rows", "steps"])
@pytest.mark.parametrize("length", [1, 5, CHUNK, CHUNK + 1, 2 * CHUNK + 9])
def test_the_definition_is_followed(length, compute):
    inputs, state = random_inputs(length), random_state()
    read, after = jax.jit(compute)(inputs, state)
    wanted, wanted_after = by_definition(inputs, state)
    np.testing.assert_allclose(read, wanted, rtol=1e-5, atol=5e-5)
    np.testing.assert_allclose(after, wanted_after, rtol=1e-5, atol=5e-5)


def test_rows_in_two_parts_are_the_rows():
    assert_two_parts_are_the_rows(state_space_rows, random_inputs(CHUNK + 20), random_state(), atol=3e-5)


def test_tokens_without_value_and_decay_are_not_there():
    inputs, state = random_inputs(20), random_state()
    nothing = jnp.arange(20)[None, :, None] >= 12
    padded = inputs._replace(
        v=jnp.where(nothing[..., None], 0.0, inputs.v), log_decay=jnp.where(nothing, 0.0, inputs.log_decay)
    )
    _, wanted = state_space_rows(part(inputs, 0, 12), state)
    np.testing.assert_allclose(state_space_rows(padded, state)[1], wanted, atol=1e-5)


def test_segments_begin_anew_within_chunks_and_at_their_borders():
    zero = jnp.zeros((B, N, K, V))
    assert_segments_begin_anew(state_space_rows, random_inputs(2 * CHUNK + 30), zero, atol=3e-5)


def test_gradients_are_those_of_the_steps():
    inputs, weights = random_inputs(13), jax.random.normal(jax.random.key(1), (B, 13, N, V))

    def summed(compute: Any) -> Any:
        return lambda inputs, state: (compute(inputs, state)[0] * weights).sum()

    found, wanted = (
        jax.jit(jax.grad(summed(f), (0, 1)))(inputs, random_state())
        for f in (state_space_rows, token_by_token)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=5e-5), found, wanted)
    assert all(float(jnp.abs(leaf).max()) > 0.1 for leaf in jax.tree.leaves(found))
