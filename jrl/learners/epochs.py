# SPDX-License-Identifier: Apache-2.0
"""The passes of an iteration over its rollouts: their order, and where they end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jrl.learners.accumulate import Rows, layout_rows
from jrl.learners.optimizers import pass_over
from jrl.learners.state import TrainState
from jrl.learners.steps import scan_steps
from jrl.ops.metrics import no_metrics
from jrl.typing import Kept, Mean, Metrics, PRNGKey

Step = Callable[[TrainState, Rows], tuple[TrainState, Metrics]]


def shuffled_rows(mask: Bool[Array, "N T"], key: PRNGKey) -> Int[Array, "N"]:
    """Rows in random order, those without any action last."""
    draws = jax.random.uniform(key, mask.shape[:1])
    return jnp.argsort(jnp.where(jnp.any(mask, axis=1), draws, 2.0)).astype(jnp.int32)


def run_epochs(
    step: Step,
    train: TrainState,
    orders: Int[Array, "E N"],
    *,
    batch_size: int,
    minibatch_size: int,
    max_kl: float | None,
    watched_kl: str = "ppo/policy_kl",
    last_step: Int[Array, ""] | None = None,
) -> tuple[TrainState, Metrics]:
    """All steps of all epochs, or those up to the end of the first epoch whose mean policy KL exceeds `max_kl`, and
    none behind `last_step`.

    The mean is over all actions of the epoch, each under the parameters that its own step started from. A step that is
    left out changes nothing but the counter and the schedule's, and adds nothing to any metric.

    Args:
      step: One optimizer step on (microbatches, rows of one).
      train: Before the first.
      orders: The rows of each epoch.
      batch_size: Rows of a step. What an epoch has left over is a step of its own.
      minibatch_size: Rows of a microbatch.
      max_kl: Ends the passes; None: nothing does.
      watched_kl: The metric that is held against it.
      last_step: `TrainState.step` after the last step of the run; None: the run does not end within these.
    Returns:
      The state after the last step, and the metrics of all steps with a leading axis; of those that keep rows, of all
      epochs.
    """
    num_rows = orders.shape[1]
    full = num_rows // batch_size * batch_size

    def layout(order: Int[Array, "R"]) -> Rows:
        return layout_rows(order, batch_size=batch_size, minibatch_size=minibatch_size)

    def left(train: TrainState) -> Int[Array, ""] | None:
        return None if last_step is None else last_step - train.step

    def epoch(train: TrainState, order: Int[Array, "N"]) -> tuple[TrainState, Metrics]:
        found: list[Metrics] = []
        # A program of its own for fewer rows: padded to a whole batch they would cost as much as one.
        for rows in (order[:full], order[full:]):
            if rows.size:
                train, stacked = scan_steps(step, train, layout(rows), left=left(train))
                found.append(stacked)
        return train, {name: _in_sequence([metrics[name] for metrics in found]) for name in found[0]}

    if max_kl is None:
        train, by_epoch = jax.lax.scan(epoch, train, orders)
    else:
        num_steps = -(-num_rows // batch_size)

        def num_idle(train: TrainState) -> int | Int[Array, ""]:
            return num_steps if last_step is None else jnp.clip(last_step - train.step, 0, num_steps)

        train, by_epoch = _until(
            epoch, train, orders, num_idle=num_idle, max_kl=max_kl, watched_kl=watched_kl
        )
    return train, {name: _flat(metric) for name, metric in by_epoch.items()}


def _until(
    epoch: Callable[[TrainState, Int[Array, "N"]], tuple[TrainState, Metrics]],
    train: TrainState,
    orders: Int[Array, "E N"],
    *,
    num_idle: Callable[[TrainState], int | Int[Array, ""]],
    max_kl: float,
    watched_kl: str,
) -> tuple[TrainState, Metrics]:
    """Epochs up to the first that moves the policy too far; those behind it idle, and count as so many steps."""
    nothing = no_metrics(jax.eval_shape(epoch, train, orders[0])[1])

    def idle(train: TrainState, order: Int[Array, "N"]) -> tuple[TrainState, Metrics]:
        del order
        steps = num_idle(train)
        return TrainState(train.step + steps, train.params, pass_over(train.opt_state, steps)), nothing

    def epoch_or_idle(
        carry: tuple[TrainState, Bool[Array, ""]], order: Int[Array, "N"]
    ) -> tuple[tuple[TrainState, Bool[Array, ""]], Metrics]:
        train, stopped = carry
        train, metrics = jax.lax.cond(stopped, idle, epoch, train, order)
        kl = metrics[watched_kl]
        assert isinstance(kl, Mean)
        return (train, stopped | (jnp.sum(kl.total) > max_kl * jnp.sum(kl.weight))), metrics

    (train, _), by_epoch = jax.lax.scan(epoch_or_idle, (train, jnp.zeros((), bool)), orders)
    return train, by_epoch


def _in_sequence(parts: list[Any]) -> Any:
    """A metric of steps after steps; the rows that one keeps, of all of them."""
    if isinstance(parts[0], Kept):
        return Kept(jnp.concatenate([part.rows.reshape(-1, part.rows.shape[-1]) for part in parts]))
    return jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)


def _flat(metric: Any) -> Any:
    """By epoch and step to by step."""
    if isinstance(metric, Kept):
        return metric
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), metric)
