# SPDX-License-Identifier: Apache-2.0
"""The learner of every online policy gradient: one compiled call an iteration, whatever its recipe says.

Reference: Schulman et al. 2017, arXiv:1707.06347; for language models Ziegler et al. 2019, arXiv:1909.08593.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jrl.forward import Reader
from jrl.learners.accumulate import (
    Loss,
    Rows,
    accumulate,
    layout_rows,
    optimizer_step,
    scan_steps,
    split_rows,
    take_rows,
)
from jrl.learners.balance import balanced, load_metric
from jrl.learners.credit import Credit, ScoreMoments, kl_per_sequence, rollout_metrics
from jrl.learners.forward import map_rows, mask_rows, trunk_of_rows
from jrl.learners.optimizers import pass_over
from jrl.learners.recipe import Loss as RecipeLoss
from jrl.learners.recipe import Recipe
from jrl.learners.state import TrainState, init_train_state
from jrl.losses.policy_gradient import Targets
from jrl.mesh import hold_split
from jrl.ops.kl import adaptive_kl_coef
from jrl.ops.metrics import max_metric, no_metrics, reduce_metrics
from jrl.ops.moments import moments_std
from jrl.ops.policy_gradient import importance_ratio
from jrl.ops.sampler_agreement import sampler_agreement
from jrl.typing import (
    Frozen,
    Kept,
    Max,
    Mean,
    Metrics,
    Params,
    PRNGKey,
    Rollouts,
    Sequences,
    Trunk,
    Update,
)

RATIOS = "ratios"
"""Behind the recipe's prefix: rows of π_θ/π_old, one a rollout and epoch, −1 where there is no action."""
_FIRST = "ratio_max_dev_first_minibatch"
Step = Callable[[TrainState, Rows], tuple[TrainState, Metrics]]
"""One optimizer step on (microbatches, rows of one)."""


@struct.dataclass
class OnlineState:
    """All that an online algorithm carries from one iteration to the next.

    Attributes:
      train: Parameters and optimizer.
      kl_coef: Weight of the KL penalty in the next iteration's rewards.
      moments: Of the scores.
    """

    train: TrainState
    kl_coef: Float[Array, ""]
    moments: ScoreMoments


class _Rows(NamedTuple):
    """Everything of a rollout that an epoch reads, row by row."""

    sequences: Sequences
    trunk: Trunk
    targets: Targets


def init_online_state(params: Params, optimizer: optax.GradientTransformation, recipe: Recipe) -> OnlineState:
    """State before the first iteration."""
    return OnlineState(
        train=init_train_state(params, optimizer),
        kl_coef=jnp.float32(0.0 if recipe.kl is None else recipe.kl.coef),
        moments=recipe.scaling.init(),
    )


def online_objective(
    reader: Reader,
    params: Params,
    frozen: Frozen,
    sequences: Sequences,
    targets: Targets,
    *,
    loss: RecipeLoss,
    prefix: str,
    trunk: Trunk = None,
    reference: Params | None = None,
    keep_ratios: bool = False,
    is_its_own_past: bool = False,
    with_load: bool = False,
) -> Loss:
    """The loss of some rollouts, to be differentiated with respect to `params`: (sum, weight, metrics).

    Args:
      reader: The model, at the temperature of the rollouts.
      params: Its trainable parameters.
      frozen: The rest.
      sequences: Rollouts.
      targets: What they are trained towards; their mask is not read, but that of the sequences.
      loss: Of a minibatch, as a recipe has it.
      prefix: Of the metrics' names.
      trunk: Of the sequences.
      reference: The reference's own parameters, for a loss that reads it; see `Recipe.reads_reference`.
      keep_ratios: Whether the metrics hold `RATIOS`.
      is_its_own_past: Whether `params` are those before the update: the old log-probabilities are then these ones, and
        the metrics say how far the sampler's, where they are known, are from them.
      with_load: Whether the metrics hold the load of the experts, for `accumulate`.
    """
    now = reader(params, frozen, sequences, trunk=trunk, with_entropy=True, ref_params=reference)
    if is_its_own_past:
        targets = targets._replace(old_logprobs=jax.lax.stop_gradient(now.logprobs))
    ratio = importance_ratio(now.logprobs, targets.old_logprobs)
    out = loss(now, targets._replace(mask=sequences.mask))
    extra: Metrics = {f"{prefix}/{_FIRST}": max_metric(jnp.abs(ratio - 1), sequences.mask)}
    if keep_ratios:
        extra[f"{prefix}/{RATIOS}"] = Kept(jnp.where(sequences.mask, ratio, -1.0))
    if is_its_own_past and targets.sampler_logprobs is not None:
        extra |= sampler_agreement(now.logprobs, targets.sampler_logprobs, sequences.mask)
    load = load_metric(now.load, sequences.mask) if with_load else {}
    return out.loss_sum, out.weight, out.metrics | jax.lax.stop_gradient(extra) | load


def make_online_update(
    reader: Reader,
    optimizer: optax.GradientTransformation,
    recipe: Recipe,
    *,
    batch_size: int,
    minibatch_size: int,
    keep_ratios: bool = False,
    is_its_own_past: bool = False,
    scores_again: bool = False,
    balance_coef: float = 0.0,
) -> Update:
    """Builds the update of an iteration: all epochs and minibatches over its rollouts, in one compiled call.

    Old log-probabilities and values are those of the rollouts, from before the first step, in every epoch. Each
    epoch visits the rollouts in a fresh order; rows without actions come last unless the recipe spreads them, and a
    step that has no other rows changes nothing.

    Args:
      reader: The model, at the temperature of the rollouts.
      optimizer: From `make_optimizer`.
      recipe: The algorithm.
      batch_size: Rollouts of an optimizer step, over all devices. The last step of an epoch may have fewer.
      minibatch_size: Rollouts in one forward pass; must divide `batch_size`.
      keep_ratios: Whether the metrics hold `RATIOS`, the ratio of every action in every epoch.
      is_its_own_past: Whether nobody scored the rollouts, and the one step of an iteration takes its own
        log-probabilities as the old ones; see `Recipe.is_its_own_past`.
      scores_again: Whether log-probabilities and values are computed anew, of the policy before the first step: the
        rollouts' are those of an earlier one, whose actions the recipe's `weigh` corrects for.
      balance_coef: Weight of the loss that balances experts, for a policy that counts them.
    Returns:
      `(OnlineState, frozen, Rollouts, key, last_step=None, reference=None) -> (OnlineState, metrics)`:
      `num_epochs · ceil(N / batch_size)` steps, or fewer under `max_policy_kl`; none behind `last_step`, the counter of
      the state after the run's last step. A step that was not made is in no metric. `reference` is the reference's own
      parameters where `Recipe.reads_reference`, else None; it is no part of the state, whose donation leaves it alone.
    Raises:
      ValueError: If `minibatch_size` does not divide `batch_size`, the temperature is not positive, or, when it is
        traced, several steps are to take their own log-probabilities as the old ones, or there is a reference and
        nobody who reads it, or none and somebody who does.
    """
    split_rows(batch_size, batch_size=batch_size, minibatch_size=minibatch_size)
    if not reader.temperature > 0:
        raise ValueError(f"`temperature` must be that of the rollouts, positive, got {reader.temperature}.")
    objective = partial(
        online_objective,
        reader,
        loss=recipe.loss,
        prefix=recipe.prefix,
        keep_ratios=keep_ratios,
        is_its_own_past=is_its_own_past,
        with_load=balance_coef > 0,
    )

    def update(
        state: OnlineState,
        frozen: Frozen,
        batch: Rollouts,
        key: PRNGKey,
        last_step: Int[Array, ""] | None = None,
        reference: Params | None = None,
    ) -> tuple[OnlineState, Metrics]:
        num_steps = recipe.num_steps(len(batch.rewards), batch_size)
        _check_call(recipe, num_steps, is_its_own_past=is_its_own_past, has_reference=reference is not None)
        if scores_again:
            batch = scored_again(reader, state.train.params, frozen, batch, minibatch_size=minibatch_size)
        kept = recipe.selected(batch)
        rows, moments = _rows_to_learn(reader, recipe, state, frozen, kept, minibatch_size=minibatch_size)
        train, stacked = run_epochs(
            _step_on(rows, frozen, reference, objective, optimizer, balance_coef),
            state.train,
            _orders(kept.sequences.mask, key, recipe),
            batch_size=batch_size,
            minibatch_size=minibatch_size,
            max_kl=recipe.max_policy_kl,
            watched_kl=f"{recipe.prefix}/policy_kl",
            last_step=last_step,
        )
        metrics = _metrics_of_steps(stacked, f"{recipe.prefix}/{_FIRST}")
        metrics |= _metrics_of_rollouts(batch, kept, rows.targets, recipe)
        metrics |= _carried_metrics(state, moments, recipe)
        return OnlineState(train, _next_kl_coef(state.kl_coef, batch, recipe), moments), metrics

    return update


def scored_again(
    reader: Reader, params: Params, frozen: Frozen, rollouts: Rollouts, *, minibatch_size: int
) -> Rollouts:
    """The rollouts as another policy reads them: its log-probabilities and values; of the reference nothing changes.

    Args:
      reader: The model, at the temperature of the rollouts.
      params: Of the policy.
      frozen: The rest.
      rollouts: Of an earlier policy.
      minibatch_size: Rows of one pass.
    """

    def read(ids: Int[Array, "R"]) -> tuple[Any, Any]:
        held = hold_split(params, ids), hold_split(frozen, ids)
        now = reader(*held, take_rows(rollouts.sequences, ids))
        return now.logprobs, now.values

    num_rows = len(rollouts.rewards)
    logprobs, values = map_rows(read, num_rows, minibatch_size=minibatch_size)
    return rollouts._replace(scored=rollouts.scored._replace(logprobs=logprobs, values=values))


def _check_call(recipe: Recipe, num_steps: int, *, is_its_own_past: bool, has_reference: bool) -> None:
    """Refuses an update that would compare with the wrong past, or with no reference."""
    if is_its_own_past and num_steps > 1:
        raise ValueError(f"`is_its_own_past` must be False for several steps an iteration, got {num_steps}.")
    if has_reference != recipe.reads_reference:
        expected = (
            "the reference's own parameters"
            if recipe.reads_reference
            else "None: the loss reads no reference"
        )
        raise ValueError(
            f"`reference` of an update must be {expected}, got {'a tree' if has_reference else None}."
        )


def _rows_to_learn(
    reader: Reader,
    recipe: Recipe,
    state: OnlineState,
    frozen: Frozen,
    rollouts: Rollouts,
    *,
    minibatch_size: int,
) -> tuple[_Rows, ScoreMoments]:
    """What all epochs read of the rollouts that are learned from, and the moments of the scores after them."""
    rewards, moments = recipe.scaled_rewards(rollouts, state.moments)
    targets = recipe.targets(
        rewards,
        rollouts.scored,
        rollouts.sequences.mask,
        state.kl_coef,
        rollouts.groups,
        rollouts.sampler_logprobs,
    )
    trunk = trunk_of_rows(reader.policy, frozen, rollouts.sequences.inputs, minibatch_size=minibatch_size)
    return _Rows(rollouts.sequences, trunk, targets), moments


def _step_on(
    everything: _Rows,
    frozen: Frozen,
    reference: Params | None,
    objective: Callable[..., Loss],
    optimizer: optax.GradientTransformation,
    balance_coef: float,
) -> Step:
    """An optimizer step on some of the rows."""
    has_action = jnp.any(everything.sequences.mask, axis=1)

    def loss_of(params: Params, rows: Rows) -> Loss:
        taken = take_rows(everything, rows.ids)
        return objective(
            params,
            hold_split(frozen, rows),
            mask_rows(taken.sequences, rows.valid),
            taken.targets,
            trunk=taken.trunk,
            reference=None if reference is None else hold_split(reference, rows),
        )

    def step(train: TrainState, rows: Rows) -> tuple[TrainState, Metrics]:
        found = accumulate(balanced(loss_of, train.params, [rows], coef=balance_coef), train.params, rows)
        # A loss that counts empty rows weighs a step of nothing but them, which has nothing to teach.
        acts = jnp.any(jnp.take(has_action, rows.ids) & rows.valid)
        weight = jnp.where(acts, found.weight, 0.0)
        return optimizer_step(train, optimizer, found._replace(weight=weight))

    return step


def _orders(mask: Bool[Array, "N T"], key: PRNGKey, recipe: Recipe) -> Int[Array, "E N"]:
    """The order of the rows in each epoch."""
    keys = jax.random.split(key, recipe.num_epochs)
    return jnp.stack([shuffled_rows(mask, one, spread_empty=recipe.spread_empty) for one in keys])


def shuffled_rows(mask: Bool[Array, "N T"], key: PRNGKey, *, spread_empty: bool = False) -> Int[Array, "N"]:
    """Rows in random order, those without any action last or, with `spread_empty`, among the others."""
    draws = jax.random.uniform(key, mask.shape[:1])
    return jnp.argsort(jnp.where(jnp.any(mask, axis=1) | spread_empty, draws, 2.0)).astype(jnp.int32)


def run_epochs(
    step: Step,
    train: TrainState,
    orders: Int[Array, "E N"],
    *,
    batch_size: int,
    minibatch_size: int,
    max_kl: float | None,
    watched_kl: str,
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
    """Flattens the axes of epochs and steps to one."""
    if isinstance(metric, Kept):
        return metric
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), metric)


def after_rollouts(
    kl_coef: Float[Array, ""], moments: ScoreMoments, rollouts: Rollouts, recipe: Recipe
) -> tuple[Float[Array, ""], ScoreMoments]:
    """KL coefficient and moments of the scores after these rollouts, as an update on them leaves them."""
    _, moments = recipe.scaled_rewards(recipe.selected(rollouts), moments)
    return _next_kl_coef(kl_coef, rollouts, recipe), moments


def _metrics_of_steps(stacked: Metrics, first_name: str) -> Metrics:
    """Metrics of all optimizer steps as one; of the ratio's deviation, the first step's alone."""
    first = stacked.pop(first_name)
    assert isinstance(first, Max)
    return reduce_metrics(stacked) | {first_name: Max(first.value[0])}


def _metrics_of_rollouts(rollouts: Rollouts, kept: Rollouts, targets: Targets, recipe: Recipe) -> Metrics:
    """Metrics of all rollouts, and of those that are learned from."""
    credit = Credit(targets.advantages, targets.returns)
    penalty = None if recipe.kl is None else recipe.kl.penalty
    mask = kept.sequences.mask
    found = rollout_metrics(rollouts, credit, kl_penalty=penalty, prefix=recipe.prefix, learned=mask)
    return found | recipe.watch(rollouts, kept, targets)


def _carried_metrics(state: OnlineState, moments: ScoreMoments, recipe: Recipe) -> Metrics:
    """Metrics of the state beside its parameters: the KL coefficient of this iteration's rewards, and the moments."""
    one = jnp.ones(())
    kl: Metrics = {} if recipe.kl is None else {"kl/coef": Mean(state.kl_coef, one)}
    return kl | {
        "reward/running_mean": Mean(moments.running.mean, one),
        "reward/running_std": Mean(moments_std(moments.running), one),
    }


def _next_kl_coef(kl_coef: Float[Array, ""], rollouts: Rollouts, recipe: Recipe) -> Float[Array, ""]:
    """The controller's answer to the rollouts of this iteration; without a target the weight is fixed."""
    if recipe.kl is None or recipe.kl.target is None or recipe.kl.horizon is None:
        return kl_coef
    kl = kl_per_sequence(rollouts, recipe.kl.penalty)
    return adaptive_kl_coef(
        kl_coef,
        kl.total / jnp.maximum(kl.weight, 1.0),
        target_kl=recipe.kl.target,
        horizon=recipe.kl.horizon,
        num_rollouts=kl.weight,
    )
