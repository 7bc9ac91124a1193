# SPDX-License-Identifier: Apache-2.0
"""Clipping and skipped steps: the same as optax's own, without its branches and its division."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrl.learners.guards import clip_by_global_norm, select_tree, skip_nonfinite

PARAMS = {"kernel": jnp.arange(6.0).reshape(2, 3), "bias": jnp.array([1.0, -2.0])}
GRADIENT = jax.tree.map(lambda x: 0.1 * x + 0.3, PARAMS)
BROKEN = GRADIENT | {"bias": jnp.array([0.5, jnp.nan])}


def visited(optimizer: optax.GradientTransformation, gradients: list[Any]) -> list[Any]:
    """Parameters and state after each step."""
    params, state, out = PARAMS, optimizer.init(PARAMS), []
    for gradient in gradients:
        updates, state = jax.jit(optimizer.update)(gradient, state, params)
        params = optax.apply_updates(params, updates)
        out.append((params, state))
    return out


def test_steps_and_counters_are_those_of_optax() -> None:
    gradients = [GRADIENT, BROKEN, BROKEN, GRADIENT, BROKEN]
    ours = visited(skip_nonfinite(optax.adam(0.1)), gradients)
    theirs = visited(optax.apply_if_finite(optax.adam(0.1), 2**31 - 1), gradients)
    for mine, yours in zip(ours, theirs, strict=True):
        jax.tree.map(np.testing.assert_array_equal, mine, yours)
    assert [int(state.notfinite_count) for _, state in ours] == [0, 1, 2, 0, 1]


def test_a_skipped_step_changes_no_bit_of_parameters_and_moments() -> None:
    (params, state), (same_params, same_state) = visited(skip_nonfinite(optax.adam(0.1)), [GRADIENT, BROKEN])
    jax.tree.map(
        np.testing.assert_array_equal, (params, state.inner_state), (same_params, same_state.inner_state)
    )


def test_a_skipped_step_keeps_the_sign_of_a_zero() -> None:
    params = {"bias": jnp.array([-0.0, 0.0])}
    optimizer = skip_nonfinite(optax.sgd(0.1))
    updates, _ = optimizer.update({"bias": jnp.array([jnp.inf, 1.0])}, optimizer.init(params), params)
    kept = optax.apply_updates(params, updates)["bias"]
    np.testing.assert_array_equal(np.signbit(kept), [True, False])


def test_a_norm_that_overflows_counts_as_not_finite() -> None:
    _, state = visited(skip_nonfinite(optax.sgd(0.1)), [jax.tree.map(lambda x: x + 1e30, GRADIENT)])[0]
    assert int(state.total_notfinite) == 1


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_clipping_is_that_of_optax(max_norm: float) -> None:
    ours, theirs = clip_by_global_norm(max_norm), optax.clip_by_global_norm(max_norm)
    got, _ = ours.update(GRADIENT, ours.init(PARAMS))
    expected, _ = theirs.update(GRADIENT, theirs.init(PARAMS))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), got, expected)
    assert float(optax.tree.norm(got)) <= max_norm * (1 + 1e-6)


def test_no_branch_and_no_division_of_whole_arrays() -> None:
    optimizer = skip_nonfinite(optax.chain(clip_by_global_norm(1.0), optax.sgd(0.1)))
    equations = jax.make_jaxpr(optimizer.update)(GRADIENT, optimizer.init(PARAMS), PARAMS).eqns
    assert not [e for e in equations if e.primitive.name == "cond"]
    assert not [e for e in equations if e.primitive.name == "div" and e.outvars[0].aval.ndim]


def test_select_tree_takes_all_leaves_from_one_side() -> None:
    other = jax.tree.map(lambda x: x + 1, PARAMS)
    jax.tree.map(np.testing.assert_array_equal, select_tree(jnp.array(False), PARAMS, other), other)
