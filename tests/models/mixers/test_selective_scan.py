# SPDX-License-Identifier: Apache-2.0
"""The selective scan of Mamba: chunks agree with the recurrence token by token, and with matrices in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models.mixers.chunks import CHUNK
from jrl.models.mixers.selective_scan import SelectiveInputs, selective_rows, selective_step
from tests.models.mixers.recurrences import (
    assert_segments_begin_anew,
    assert_two_parts_are_the_rows,
    by_steps,
    part,
)

B, C, K = 2, 6, 5
RATES = jnp.asarray(np.exp(np.random.default_rng(1).normal(size=(K, C))), jnp.float32)


def random_inputs(length: int, *, seed: int = 0) -> SelectiveInputs:
    """Slow and fast decays: the last channel forgets within a token."""
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, B, length, 1, K))
    v = rng.normal(size=(B, length, C))
    step = rng.exponential(size=(B, length, C)) * np.array([0.0, 0.01, 0.1, 0.5, 5.0, 500.0])
    return SelectiveInputs(*(jnp.asarray(x, jnp.float32) for x in (q, k, v, step)))


def by_definition(inputs: SelectiveInputs, state: Any, rates: Any = RATES) -> tuple[np.ndarray, np.ndarray]:
    """The paper's h ← exp(Δ A) h + Δ B x and y = C h, channel by channel in float64; its h is S turned."""
    queries, keys, values, steps = (np.asarray(part, np.float64) for part in inputs)
    state, a = np.array(state, np.float64), -np.asarray(rates, np.float64).T
    read = np.zeros(values.shape)
    for row in range(B):
        for channel in range(C):
            h = state[row, :, channel]
            for t in range(values.shape[1]):
                step = steps[row, t, channel]
                h = np.exp(step * a[channel]) * h + step * keys[row, t, 0] * values[row, t, channel]
                read[row, t, channel] = queries[row, t, 0] @ h
            state[row, :, channel] = h
    return read, state


def by_rows(inputs: SelectiveInputs, state: Any, segments: Any = None) -> Any:
    return selective_rows(inputs, RATES, state, segments)


def token_by_token(inputs: SelectiveInputs, state: Any) -> Any:
    return by_steps(lambda inputs, state: selective_step(inputs, RATES, state), inputs, state)


def random_state() -> Any:
    return jax.random.normal(jax.random.key(9), (B, K, C))


@pytest.mark.parametrize("compute", [by_rows, token_by_token], ids=["rows", "steps"])
@pytest.mark.parametrize("length", [1, 5, CHUNK, CHUNK + 1, 2 * CHUNK + 9])
def test_the_definition_is_followed(length, compute):
    inputs, state = random_inputs(length), random_state()
    read, after = jax.jit(compute)(inputs, state)
    wanted, wanted_after = by_definition(inputs, state)
    np.testing.assert_allclose(read, wanted, rtol=1e-5, atol=5e-5)
    np.testing.assert_allclose(after, wanted_after, rtol=1e-5, atol=5e-5)


def test_rows_in_two_parts_are_the_rows():
    assert_two_parts_are_the_rows(by_rows, random_inputs(CHUNK + 20), random_state(), rtol=1e-5, atol=3e-5)


def test_tokens_without_a_step_are_not_there():
    inputs, state = random_inputs(20), random_state()
    nothing = jnp.arange(20)[None, :, None] >= 12
    padded = inputs._replace(step=jnp.where(nothing, 0.0, inputs.step))
    _, wanted = by_rows(part(inputs, 0, 12), state)
    np.testing.assert_allclose(by_rows(padded, state)[1], wanted, rtol=1e-5, atol=1e-5)


def test_segments_begin_anew_within_chunks_and_at_their_borders():
    zero = jnp.zeros((B, K, C))
    assert_segments_begin_anew(by_rows, random_inputs(2 * CHUNK + 30), zero, rtol=1e-5, atol=3e-5)


def test_gradients_are_those_of_the_definition():
    """Of inputs, rates and state, by differences of the definition in float64 along random directions."""
    length = CHUNK + 9
    inputs, state = random_inputs(length), random_state()
    weights = np.asarray(jax.random.normal(jax.random.key(1), (B, length, C)), np.float64)

    def summed(inputs: Any, rates: Any, state: Any) -> Any:
        return (selective_rows(inputs, rates, state)[0] * jnp.asarray(weights, jnp.float32)).sum()

    given = tuple(inputs), RATES, state
    gradients = jax.jit(jax.grad(lambda q, rates, s: summed(SelectiveInputs(*q), rates, s), (0, 1, 2)))(
        *given
    )
    leaves, tree = jax.tree.flatten(given)
    for number, (leaf, gradient) in enumerate(zip(leaves, jax.tree.leaves(gradients), strict=True)):
        rng = np.random.default_rng(number)
        along = rng.normal(size=leaf.shape) * (np.asarray(leaf) != 0)

        def moved(by: float, number: int = number, along: Any = along) -> float:
            parts = [
                np.asarray(x, np.float64) + (by * along if n == number else 0) for n, x in enumerate(leaves)
            ]
            inputs, rates, state = jax.tree.unflatten(tree, parts)
            return float((by_definition(SelectiveInputs(*inputs), state, rates)[0] * weights).sum())

        wanted = (moved(1e-6) - moved(-1e-6)) / 2e-6
        scale = float(np.linalg.norm(np.asarray(gradient) * along))
        assert (
            scale > 0.1
            and abs(float((np.asarray(gradient, np.float64) * along).sum()) - wanted) < 1e-3 * scale
        )


@pytest.mark.parametrize("step", [0.0, 1e-30, 1e4, 1e30])
def test_extreme_steps_and_their_gradients_are_finite(step):
    inputs = random_inputs(CHUNK + 3)
    inputs = inputs._replace(step=jnp.full_like(inputs.step, step), v=inputs.v / max(step, 1.0))

    def loss(inputs: Any, rates: Any, state: Any) -> Any:
        read, after = selective_rows(inputs, rates, state)
        return read.sum() + after.sum(), read

    (_, read), gradient = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(inputs, RATES, random_state())
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves((read, gradient)))
    if step >= 1e4:
        # Of everything before, nothing is left: each token reads what it has taken up itself.
        own = (inputs.q * inputs.k).sum(-1) * inputs.step * inputs.v
        np.testing.assert_allclose(read, own, rtol=1e-5, atol=1e-6)


def sizes(jaxpr: Any) -> Iterator[int]:
    """Elements of every array that a program makes, inner programs included."""
    for equation in jaxpr.eqns:
        yield from (int(np.prod(variable.aval.shape)) for variable in equation.outvars)
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from sizes(inner)


def test_no_array_holds_the_states_of_a_whole_row():
    """Forward there is one state at a time; backward, one a chunk and those of the chunk at work."""
    state = jax.ShapeDtypeStruct((B, K, C), jnp.float32)

    def largest(compute: Any, length: int) -> int:
        inputs = jax.eval_shape(lambda: random_inputs(length))
        return max(sizes(jax.make_jaxpr(compute)(inputs, state).jaxpr))

    def gradient(*given: Any) -> Any:
        return jax.grad(lambda *given: by_rows(*given)[0].sum(), (0, 1))(*given)

    assert largest(by_rows, 2 * CHUNK) == B * 2 * CHUNK * C < B * CHUNK * K * C
    assert largest(gradient, 40 * CHUNK) == B * 40 * CHUNK * C
