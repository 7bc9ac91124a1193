# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation: optimizer steps over microbatches, from which every learner is built.

An objective returns the *sum* of its loss and the weight it would be divided by. Gradients and weights are
added up over the microbatches and divided once, by the weight of the whole optimizer batch, so neither the
number of microbatches nor the number of devices changes the step, however ragged the rows are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from jrl.learners.guards import select_tree
from jrl.learners.optimizers import learning_rate, pass_over
from jrl.learners.state import TrainState
from jrl.mesh import constrain_rows_alone, hold_split, rows_of_device, split_evenly
from jrl.ops.metrics import merge_metrics, no_metrics, reduce_metrics
from jrl.typing import Frozen, Max, Mean, Metrics, Params, PRNGKey

Tree = TypeVar("Tree")
State = TypeVar("State")


class Rows(NamedTuple):
    """Row numbers of a microbatch within its batch.

    Attributes:
      ids: Row numbers.
      valid: False on padding, whose id is 0: an objective must give such rows no weight.
    """

    ids: Int[Array, "*shape"]
    valid: Bool[Array, "*shape"]


Loss = tuple[Float[Array, ""], Float[Array, ""], Metrics]
"""(loss_sum, weight, metrics)."""
Objective = Callable[[Params, Rows], Loss]
"""`(params, rows) -> (loss_sum, weight, metrics)` of the microbatch made of these rows."""
Batch = TypeVar("Batch")
OwnObjective = Callable[[Params, Frozen, Batch], Loss]
"""`(params, frozen, batch) -> (loss_sum, weight, metrics)` of a microbatch, in the place of a learner's own."""


class Accumulated(NamedTuple):
    """Loss, gradient and metrics of a whole optimizer batch.

    Attributes:
      loss: Sum of the losses over the weight.
      weight: Of the whole optimizer batch.
      grads: Gradient of `loss`; NaN throughout where the loss is not finite.
      metrics: Of all microbatches together.
    """

    loss: Float[Array, ""]
    weight: Float[Array, ""]
    grads: Params
    metrics: Metrics


SENT_BYTES = 256 << 20
"""Bytes of a microbatch that a device makes at once, while devices send each other rows that they have."""


def take_rows(tree: Tree, ids: Int[Array, "R"]) -> Tree:
    """Rows of every array of a tree, kept spread over the mesh's batch axes.

    Any row may be on any device. XLA makes all R rows on each, zero but for its own, and adds them up: an array that is
    as large on many devices as on few. One above `SENT_BYTES` is made in pieces of the last axis but one.
    """

    def take(x: Array) -> Array:
        return constrain_rows_alone(jnp.take(x, ids, axis=0))

    def take_in_pieces(x: Array) -> Array:
        size = ids.size * x.dtype.itemsize * math.prod(x.shape[1:])
        is_sent = all(rows_of_device(rows) < rows for rows in (len(x), ids.size))
        if x.ndim < 3 or size <= SENT_BYTES or not is_sent:
            return take(x)
        axis, length = x.ndim - 2, x.shape[-2]
        count = min(-(-size // SENT_BYTES), length)
        width = -(-length // count)

        def put(number: Array, found: Array) -> Array:
            start = jnp.minimum(number * width, length - width)  # the last piece overlaps the one before
            piece = take(jax.lax.dynamic_slice_in_dim(x, start, width, axis))
            return jax.lax.dynamic_update_slice_in_dim(found, piece, start, axis)

        nothing = constrain_rows_alone(jnp.zeros((ids.size, *x.shape[1:]), x.dtype))
        found: Array = jax.lax.fori_loop(0, -(-length // width), put, nothing)
        return found

    taken: Tree = jax.tree.map(take_in_pieces, tree)
    return taken


def split_rows(num_rows: int, *, batch_size: int, minibatch_size: int) -> tuple[int, int, int]:
    """Plans how `num_rows` rows are cut into optimizer batches of microbatches.

    The last batch is padded with invalid rows. Where all rows fit into less than one batch, no microbatch of
    mere padding is made.

    Returns:
      (optimizer batches, microbatches of each, rows of a microbatch).
    Raises:
      ValueError: If `minibatch_size` does not divide `batch_size`.
    """
    if minibatch_size < 1 or batch_size % minibatch_size:
        raise ValueError(
            f"`minibatch_size` must divide `batch_size` = {batch_size} (rows of an optimizer step), "
            f"got {minibatch_size}."
        )
    batch_rows = min(batch_size, num_rows)
    rows = min(minibatch_size, split_evenly(num_rows))
    return -(-num_rows // batch_size), -(-batch_rows // rows), rows


def layout_rows(order: Int[Array, "R"], *, batch_size: int, minibatch_size: int) -> Rows:
    """Rows in the given order as (optimizer batches, microbatches, rows of one), padded at the end."""
    num_rows = order.shape[0]
    batches, microbatches, rows = split_rows(num_rows, batch_size=batch_size, minibatch_size=minibatch_size)
    width = min(batch_size, num_rows)
    batched = jnp.pad(order, (0, batches * width - num_rows)).reshape(batches, width)
    valid = (jnp.arange(batches * width) < num_rows).reshape(batches, width)
    missing = ((0, 0), (0, microbatches * rows - width))
    shape = (batches, microbatches, rows)
    return Rows(jnp.pad(batched, missing).reshape(shape), jnp.pad(valid, missing).reshape(shape))


def batch_in_order(
    num_rows: int, *, batch_size: int, minibatch_size: int, unit: str = "rows", padded: bool = True
) -> list[Rows]:
    """A batch that is one optimizer step, in its own order: stacks of (microbatches, rows of one).

    Args:
      num_rows: Rows of the batch.
      batch_size: Most rows that it may have.
      minibatch_size: Rows of a microbatch; must divide `batch_size`.
      unit: What a row is, for the error.
      padded: Whether the last microbatch is filled up with invalid rows. Else what is left over is a shorter one, in a
        stack of its own: under an objective that is a mean over its rows, padding would be among them.
    Raises:
      ValueError: If the batch has more rows, or is not divided.
    """
    if num_rows > batch_size:
        raise ValueError(f"`batch` must have at most `batch_size` = {batch_size} {unit}, got {num_rows}.")
    order = jnp.arange(num_rows, dtype=jnp.int32)
    if padded:
        layout = layout_rows(order, batch_size=batch_size, minibatch_size=minibatch_size)
        return [jax.tree.map(lambda x: x[0], layout)]
    end = num_rows - num_rows % minibatch_size
    stacks = (order[:end].reshape(-1, minibatch_size), order[None, end:])
    return [Rows(ids, jnp.ones_like(ids, bool)) for ids in stacks if ids.size]


def microbatch_key(key: PRNGKey, rows: Rows) -> PRNGKey:
    """Random key of a microbatch, for its dropout and the like, derived from the id of its first row."""
    return jax.random.fold_in(key, rows.ids[0])


def accumulate(objective: Objective, params: Params, *microbatches: Rows) -> Accumulated:
    """Loss and gradient of one optimizer batch, one microbatch in memory at a time.

    Args:
      objective: Differentiated with respect to `params`.
      params: Trainable parameters.
      *microbatches: Stacks of (microbatches, rows of one); one stack where all have as many rows.
    Returns:
      The mean loss and its gradient; 0 where the batch has no weight at all.
    """

    def loss(params: Params, rows: Rows) -> tuple[Float[Array, ""], tuple[Float[Array, ""], Metrics]]:
        loss_sum, weight, metrics = objective(params, rows)
        return loss_sum, (weight, metrics)

    def add(carry: tuple[Any, Any, Any], rows: Rows) -> tuple[tuple[Any, Any, Any], Metrics]:
        grads, loss_sum, weight = carry
        held = hold_split(params, rows)
        (more_loss, (more_weight, metrics)), more_grads = jax.value_and_grad(loss, has_aux=True)(held, rows)
        carry = (jax.tree.map(jnp.add, grads, more_grads), loss_sum + more_loss, weight + more_weight)
        return carry, metrics

    zero = jnp.zeros((), jnp.float32)
    sums = (jax.tree.map(jnp.zeros_like, params), zero, zero)
    metrics: Metrics = {}
    for stack in microbatches:
        sums, stacked = jax.lax.scan(add, sums, stack)
        metrics = merge_metrics(metrics, reduce_metrics(stacked))
    grads, loss_sum, weight = sums
    divisor = jnp.where(weight > 0, weight, 1.0)
    mean_loss = loss_sum / divisor
    # A loss that overflowed may still have a finite gradient; the step must be skipped all the same.
    scale = jnp.where(jnp.isfinite(mean_loss), 1.0 / divisor, jnp.nan)
    grads = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
    return Accumulated(mean_loss, weight, grads, metrics)


def optimizer_step(
    state: TrainState, optimizer: optax.GradientTransformation, batch: Accumulated
) -> tuple[TrainState, Metrics]:
    """Takes an optimizer step along the gradient of an optimizer batch.

    A step whose loss or gradient is not finite is skipped: parameters and moments stay, the optimizer's
    counters say so. A batch without any weight (all its rows are padding) changes nothing but the place in the
    schedule, and is no failure.

    Args:
      state: Before the step.
      optimizer: Wrapped in `skip_nonfinite`, as `make_optimizer` returns it.
      batch: From `accumulate`, at the parameters of this state.
    Returns:
      The state, its `step` one higher in every case, and the objective's metrics with `optim/*`: norm of the
      accumulated gradient before clipping, learning rate, steps skipped so far and those in a row.
    Raises:
      TypeError: If the optimizer does not skip non-finite steps.
    """
    if not isinstance(state.opt_state, optax.ApplyIfFiniteState):
        raise TypeError(
            "`optimizer` must skip non-finite steps: make it with jrl.learners.optimizers.make_optimizer, or "
            f"wrap it in jrl.learners.guards.skip_nonfinite; its state is {type(state.opt_state).__name__}."
        )
    updates, opt_state = optimizer.update(batch.grads, state.opt_state, state.params)
    # Selected, not branched: see `skip_nonfinite`.
    params, opt_state = select_tree(
        batch.weight > 0,
        (optax.apply_updates(state.params, updates), opt_state),
        # The schedule goes on: it is to end when the run does.
        (state.params, pass_over(state.opt_state, 1)),
    )
    grad_norm = optax.tree.norm(batch.grads)
    counted = jnp.isfinite(grad_norm) & (batch.weight > 0)
    metrics = batch.metrics | {
        "optim/grad_norm": Mean(jnp.where(counted, grad_norm, 0.0), counted.astype(jnp.float32)),
        "optim/skipped_steps": Max(opt_state.total_notfinite.astype(jnp.float32)),
        "optim/skipped_in_a_row": Max(opt_state.notfinite_count.astype(jnp.float32)),
    }
    rate = learning_rate(opt_state)
    if rate is not None:
        metrics["optim/learning_rate"] = Mean(rate, jnp.ones((), jnp.float32))
    return TrainState(step=state.step + 1, params=params, opt_state=opt_state), metrics


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
