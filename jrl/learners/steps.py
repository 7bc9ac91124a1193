# SPDX-License-Identifier: Apache-2.0
"""The optimizer steps of one update, up to the last one of the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jrl.learners.accumulate import Rows
from jrl.ops.metrics import no_metrics
from jrl.typing import Metrics

State = TypeVar("State")


def scan_steps(
    step: Callable[[State, Rows], tuple[State, Metrics]],
    state: State,
    rows: Rows,
    *,
    left: Int[Array, ""] | None,
) -> tuple[State, Metrics]:
    """`jax.lax.scan` over optimizer steps, which ends early where the run does.

    The number of steps is a figure of the running program, so the last update of a run is not compiled anew.

    Args:
      step: One optimizer step.
      state: Before the first.
      rows: Of each step, along the leading axis.
      left: Steps that may still be made; None: no limit, and the program knows their number.
    Returns:
      The state after the last step made, and the metrics of all with a leading axis; a step that was not made adds
      nothing to any of them.
    """
    if left is None:
        return jax.lax.scan(step, state, rows)
    num_steps = rows.ids.shape[0]

    def taken(number: Any) -> Rows:
        return jax.tree.map(lambda x: x[number], rows)

    def one(number: Any, carry: tuple[State, Metrics]) -> tuple[State, Metrics]:
        state, metrics = carry
        state, made = step(state, taken(number))
        return state, jax.tree.map(lambda steps, x: steps.at[number].set(x), metrics, made)

    _, shapes = jax.eval_shape(step, state, taken(0))
    nothing = no_metrics(jax.tree.map(lambda x: jax.ShapeDtypeStruct((num_steps, *x.shape), x.dtype), shapes))
    found: tuple[State, Metrics] = jax.lax.fori_loop(0, jnp.clip(left, 0, num_steps), one, (state, nothing))
    return found
