# SPDX-License-Identifier: Apache-2.0
"""Microbatches, denominators, clipping and skipped steps, on a linear model with ragged weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrl.learners.accumulate import Rows, accumulate, layout_rows, optimizer_step, split_rows, take_rows
from jrl.learners.optimizers import make_optimizer, make_schedule, pass_over
from jrl.learners.state import init_train_state
from jrl.ops.metrics import finalize, mean_metric

NUM_ROWS, WIDTH = 8, 3
RNG = np.random.default_rng(0)
INPUTS = jnp.asarray(RNG.normal(size=(NUM_ROWS, WIDTH)), jnp.float32)
TARGETS = jnp.asarray(RNG.normal(size=NUM_ROWS), jnp.float32)
# Ragged on purpose: with equal weights the mean of microbatch means would be right by accident.
WEIGHTS = jnp.asarray([1.0, 7.0, 2.0, 1.0, 9.0, 3.0, 1.0, 4.0])
PARAMS = {"kernel": jnp.asarray([0.5, -1.0, 2.0])}


def objective(params: Any, rows: Rows, targets: jax.Array = TARGETS) -> tuple[jax.Array, jax.Array, Any]:
    """Weighted squared error."""
    x, y, weights = take_rows((INPUTS, targets, WEIGHTS), rows.ids)
    weights = jnp.where(rows.valid, weights, 0.0)
    errors = jnp.square(x @ params["kernel"] - y)
    return jnp.sum(weights * errors), jnp.sum(weights), {"error": mean_metric(errors, rows.valid)}


def microbatches(minibatch_size: int, num_rows: int = NUM_ROWS) -> Rows:
    layout = layout_rows(jnp.arange(num_rows), batch_size=num_rows, minibatch_size=minibatch_size)
    return jax.tree.map(lambda x: x[0], layout)


def exact_gradient() -> np.ndarray:
    """d/dw of Σ w_i (x_i·w − y_i)² / Σ w_i, in float64."""
    x, y, weights = (np.asarray(a, np.float64) for a in (INPUTS, TARGETS, WEIGHTS))
    return 2 * (weights * (x @ np.asarray(PARAMS["kernel"], np.float64) - y)) @ x / weights.sum()


def sgd(max_grad_norm: float | None = None) -> optax.GradientTransformation:
    return make_optimizer("sgd", {"lr": 1.0}, make_schedule("constant", {}), max_grad_norm=max_grad_norm)


@pytest.mark.parametrize("minibatch_size", [1, 2, 4, 8])
def test_lore_5_2_one_denominator_for_the_whole_batch(minibatch_size: int) -> None:
    batch = jax.jit(lambda p: accumulate(objective, p, microbatches(minibatch_size)))(PARAMS)
    np.testing.assert_allclose(batch.grads["kernel"], exact_gradient(), rtol=1e-5)
    assert batch.weight == WEIGHTS.sum()
    errors = np.square(INPUTS @ PARAMS["kernel"] - TARGETS)
    np.testing.assert_allclose(batch.loss, np.average(errors, weights=WEIGHTS), rtol=1e-5)
    np.testing.assert_allclose(finalize(batch.metrics)["error"], errors.mean(), rtol=1e-5)


@pytest.mark.parametrize("minibatch_size", [1, 8])
def test_lore_7_3_the_accumulated_gradient_is_clipped_and_its_norm_logged_before(minibatch_size: int) -> None:
    optimizer = sgd(max_grad_norm=0.25)
    state = init_train_state(PARAMS, optimizer)
    rows = microbatches(minibatch_size)
    after, metrics = jax.jit(lambda s: optimizer_step(s, optimizer, accumulate(objective, s.params, rows)))(
        state
    )
    gradient = exact_gradient()
    norm = np.linalg.norm(gradient)
    assert norm > 1  # far over the limit, or there would be nothing to see
    assert finalize(metrics)["optim/grad_norm"] == pytest.approx(norm, rel=1e-5)
    np.testing.assert_allclose(
        PARAMS["kernel"] - after.params["kernel"], gradient * 0.25 / norm, rtol=1e-4, atol=1e-7
    )


@pytest.mark.parametrize("where", ["loss", "gradient", "overflow"])
def test_lore_7_6_a_step_that_is_not_finite_is_skipped_and_counted(where: str) -> None:
    def broken(params: Any, rows: Rows) -> tuple[jax.Array, jax.Array, Any]:
        loss_sum, weight, metrics = objective(params, rows)
        hit = jnp.any(rows.valid & (rows.ids == 3))  # one row of one microbatch
        if where == "loss":
            loss_sum = jnp.where(hit, jnp.nan, loss_sum)
        elif where == "gradient":
            # Finite in value, not in gradient: sqrt at 0.
            loss_sum = loss_sum + jnp.where(hit, jnp.sqrt(0.0 * jnp.sum(params["kernel"])), 0.0)
        else:
            # Infinite in value, finite in gradient: the gradient alone would let it pass.
            loss_sum = loss_sum + jax.lax.stop_gradient(jnp.where(hit, jnp.inf, 0.0))
        return loss_sum, weight, metrics

    optimizer = make_optimizer("adam", {"lr": 0.1}, make_schedule("constant", {}), max_grad_norm=1.0)
    run = jax.jit(
        lambda s, good: jax.lax.cond(
            good,
            lambda s: optimizer_step(s, optimizer, accumulate(objective, s.params, microbatches(2))),
            lambda s: optimizer_step(s, optimizer, accumulate(broken, s.params, microbatches(2))),
            s,
        )
    )
    state, _ = run(init_train_state(PARAMS, optimizer), True)
    once, metrics = run(state, False)
    twice, more = run(once, False)
    jax.tree.map(np.testing.assert_array_equal, twice.params, state.params)
    jax.tree.map(np.testing.assert_array_equal, twice.opt_state.inner_state, state.opt_state.inner_state)
    assert finalize(metrics)["optim/skipped_in_a_row"] == 1 and finalize(more)["optim/skipped_in_a_row"] == 2
    assert "optim/grad_norm" not in finalize(metrics) or where == "overflow"
    healed, last = run(twice, True)
    assert finalize(last)["optim/skipped_in_a_row"] == 0 and finalize(last)["optim/skipped_steps"] == 2
    assert np.any(np.asarray(healed.params["kernel"]) != np.asarray(twice.params["kernel"]))
    assert int(healed.step) == 4


def test_lore_7_2_small_updates_move_the_master_weights() -> None:
    def slope(params: Any, rows: Rows) -> tuple[jax.Array, jax.Array, Any]:
        return -params["kernel"][0], jnp.ones(()), {}

    optimizer = make_optimizer("sgd", {"lr": 1e-6}, make_schedule("constant", {}), max_grad_norm=None)
    state = init_train_state({"kernel": jnp.ones(1)}, optimizer)
    state, _ = jax.lax.scan(
        lambda s, _: optimizer_step(s, optimizer, accumulate(slope, s.params, microbatches(8))),
        state,
        None,
        length=1000,
    )
    # A thousand steps of 1e-6 at 1.0: bfloat16 cannot move by less than 0.0039 and would stay where it is.
    assert float(state.params["kernel"][0]) == pytest.approx(1.001, abs=1e-4)


def test_a_batch_without_weight_changes_nothing_but_the_place_in_the_schedule() -> None:
    schedule = make_schedule("cosine_annealing", {"T_max": 4})
    optimizer = make_optimizer("adamw", {"lr": 0.1}, schedule, max_grad_norm=None)
    state = init_train_state(PARAMS, optimizer)
    nothing = Rows(jnp.zeros((2, 4), jnp.int32), jnp.zeros((2, 4), bool))
    after, metrics = optimizer_step(state, optimizer, accumulate(objective, state.params, nothing))
    passed = pass_over(state.opt_state, 1)
    jax.tree.map(np.testing.assert_array_equal, (after.params, after.opt_state), (state.params, passed))
    assert int(after.step) == 1
    _, next_metrics = optimizer_step(after, optimizer, accumulate(objective, PARAMS, microbatches(4)))
    second_of_four = 0.1 * (1 + np.cos(np.pi / 4)) / 2
    assert finalize(next_metrics)["optim/learning_rate"] == pytest.approx(second_of_four)
    assert "optim/grad_norm" not in finalize(metrics) and "error" not in finalize(metrics)


def test_an_optimizer_that_does_not_skip_is_refused() -> None:
    optimizer = optax.sgd(0.1)
    with pytest.raises(TypeError, match="make_optimizer"):
        optimizer_step(
            init_train_state(PARAMS, optimizer), optimizer, accumulate(objective, PARAMS, microbatches(4))
        )


@pytest.mark.parametrize(
    ("num_rows", "batch_size", "minibatch_size", "shape"),
    [
        (8, 4, 2, (2, 2, 2)),
        (10, 4, 2, (3, 2, 2)),
        (3, 32, 8, (1, 1, 3)),
        (6, 32, 4, (1, 2, 4)),
        (5, 4, 4, (2, 1, 4)),
    ],
)
def test_rows_are_visited_once_and_padded_at_the_end(
    num_rows: int, batch_size: int, minibatch_size: int, shape: tuple[int, int, int]
) -> None:
    assert split_rows(num_rows, batch_size=batch_size, minibatch_size=minibatch_size) == shape
    order = jnp.asarray(np.random.default_rng(1).permutation(num_rows))
    rows = layout_rows(order, batch_size=batch_size, minibatch_size=minibatch_size)
    assert rows.ids.shape == rows.valid.shape == shape
    np.testing.assert_array_equal(rows.ids[rows.valid], order)
    assert not np.any(rows.ids[~rows.valid])
    # Only the last optimizer batch is ragged.
    assert rows.valid[:-1].sum(axis=(1, 2)).tolist() == [batch_size] * (shape[0] - 1)


def test_minibatches_must_divide_the_batch() -> None:
    with pytest.raises(ValueError, match="`minibatch_size` must divide `batch_size` = 8"):
        split_rows(8, batch_size=8, minibatch_size=3)
