# SPDX-License-Identifier: Apache-2.0
"""An update that ends with the run: the steps that are left, and nothing of those behind them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrl.learners.accumulate import accumulate, optimizer_step
from jrl.learners.online import run_epochs
from jrl.learners.state import init_train_state
from jrl.ops.metrics import finalize, reduce_metrics
from jrl.typing import Kept, Max, Mean, Min
from tests.learners.batches import adam

ROWS = jnp.arange(1.0, 6.0)
ORDERS = jnp.array([[0, 1, 2, 3, 4], [4, 3, 2, 1, 0]])
STEPS = 6  # two passes over 5 rows in batches of 2


@jax.jit
def passes(train, last_step, max_kl):
    """Least squares on a scalar; the metrics say which rows were seen."""

    def objective(params, rows):
        targets = jnp.where(rows.valid, ROWS[rows.ids], 0.0)
        loss = jnp.sum(jnp.where(rows.valid, (params["w"] - targets) ** 2, 0.0))
        weight = jnp.sum(rows.valid, dtype=jnp.float32)
        kept = jnp.where(rows.valid, targets, -1.0)[:, None]
        seen = {"seen": Mean(jnp.sum(targets), weight), "ppo/policy_kl": Mean(weight, weight)}
        return (
            loss,
            weight,
            seen | {"most": Max(jnp.max(targets)), "least": Min(targets[0]), "rows": Kept(kept)},
        )

    def step(train, rows):
        return optimizer_step(train, adam(0.1), accumulate(objective, train.params, rows))

    sizes = {"batch_size": 2, "minibatch_size": 1}
    return run_epochs(
        step, train, ORDERS, **sizes, max_kl=max_kl, watched_kl="ppo/policy_kl", last_step=last_step
    )


def fresh(made=0):
    train = init_train_state({"w": jnp.zeros(())}, adam(0.1))
    return train.replace(step=jnp.int32(made))


def passes_up_to(last_step, *, made=0, max_kl=None):
    train, stacked = passes(fresh(made), last_step, max_kl)
    return train, finalize(reduce_metrics(stacked)), stacked


@pytest.mark.parametrize("last_step", [STEPS, STEPS + 3])
def test_an_update_with_steps_to_spare_is_the_whole_one_bit_for_bit(last_step):
    whole, cut = passes_up_to(None), passes_up_to(last_step)
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(cut), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("left", range(1, STEPS))
def test_only_the_steps_that_are_left_are_made_and_counted(left):
    train, metrics, stacked = passes_up_to(10 + left, made=10)
    assert int(train.step) == 10 + left
    assert int(optax.tree.get(train.opt_state, "steps")) == left
    batches = [[1, 2], [3, 4], [5], [5, 4], [3, 2], [1]][:left]
    seen = [row for batch in batches for row in batch]
    assert metrics["seen"] == pytest.approx(np.mean(seen))
    assert metrics["most"] == max(seen) and metrics["least"] == min(batch[0] for batch in batches)
    kept = np.asarray(stacked["rows"].rows)
    assert sorted(kept[kept > 0]) == sorted(seen)


def test_a_longer_update_begins_with_the_shorter_one():
    params = [float(passes_up_to(last_step)[0].params["w"]) for last_step in range(1, STEPS + 1)]
    assert len(set(params)) == STEPS
    whole, _, _ = passes_up_to(None)
    assert params[-1] == float(whole.params["w"])


def test_steps_left_out_under_max_policy_kl_do_not_count_past_the_last_one():
    train, metrics, _ = passes_up_to(5, max_kl=0.5)  # the first pass of three steps moves by 1
    assert int(train.step) == 5 and int(optax.tree.get(train.opt_state, "steps")) == 5
    assert metrics["seen"] == pytest.approx(3.0)
    train, _, _ = passes_up_to(2, max_kl=0.5)
    assert int(train.step) == 2
