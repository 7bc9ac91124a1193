# SPDX-License-Identifier: Apache-2.0
"""The passes of a PPO iteration over its rollouts: their order, and where they end."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jrl.learners.accumulate import Rows
from jrl.learners.optimizers import pass_over
from jrl.learners.state import TrainState
from jrl.typing import Kept, Max, Mean, Metrics, Min, PRNGKey

_POLICY_KL = "ppo/policy_kl"


def shuffled_rows(mask: Bool[Array, "N T"], key: PRNGKey) -> Int[Array, "N"]:
    """Rows in random order, those without any action last."""
    draws = jax.random.uniform(key, mask.shape[:1])
    return jnp.argsort(jnp.where(jnp.any(mask, axis=1), draws, 2.0)).astype(jnp.int32)


def run_steps(
    step: Callable[[TrainState, Rows], tuple[TrainState, Metrics]],
    train: TrainState,
    steps: Rows,
    *,
    num_epochs: int,
    max_kl: float | None,
) -> tuple[TrainState, Metrics]:
    """All steps of all epochs, or those up to the end of the first epoch whose mean policy KL exceeds `max_kl`.

    The mean is over all actions of the epoch, each under the parameters that its own step started from. A step that is
    left out changes nothing but the counter and the schedule's, and adds nothing to any metric.
    """
    if max_kl is None:
        return jax.lax.scan(step, train, steps)
    num_steps = steps.ids.shape[0]
    ends_epoch = (jnp.arange(num_steps) + 1) % (num_steps // num_epochs) == 0
    first = jax.tree.map(lambda x: x[0], steps)
    no_metrics = jax.tree.map(
        _nothing,
        jax.eval_shape(step, train, first)[1],
        is_leaf=lambda x: isinstance(x, Mean | Max | Min | Kept),
    )

    def step_or_idle(
        carry: tuple[TrainState, Mean, Bool[Array, ""]], now: tuple[Rows, Bool[Array, ""]]
    ) -> tuple[tuple[TrainState, Mean, Bool[Array, ""]], Metrics]:
        (train, kl, stopped), (rows, ends) = carry, now
        train, metrics = jax.lax.cond(
            stopped,
            lambda train, _: (
                TrainState(train.step + 1, train.params, pass_over(train.opt_state)),
                no_metrics,
            ),
            step,
            train,
            rows,
        )
        more = metrics[_POLICY_KL]
        assert isinstance(more, Mean)
        kl = Mean(kl.total + more.total, kl.weight + more.weight)
        stopped = stopped | (ends & (kl.total > max_kl * kl.weight))
        return (train, jax.tree.map(lambda x: jnp.where(ends, 0.0, x), kl), stopped), metrics

    zero = jnp.zeros(())
    (train, _, _), stacked = jax.lax.scan(
        step_or_idle, (train, Mean(zero, zero), jnp.zeros((), bool)), (steps, ends_epoch)
    )
    return train, stacked


def _nothing(metric: Mean | Max | Min | Kept) -> Mean | Max | Min | Kept:
    """What adds nothing to a metric of these shapes."""
    if isinstance(metric, Mean):
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), metric)
    fill = {Max: -jnp.inf, Min: jnp.inf, Kept: -1.0}[type(metric)]
    return jax.tree.map(lambda x: jnp.full(x.shape, fill, x.dtype), metric)
