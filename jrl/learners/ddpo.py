# SPDX-License-Identifier: Apache-2.0
"""Denoising diffusion policy optimisation: policy gradients on the single steps of a diffusion sampler.

Reference: Black et al. 2023, arXiv:2305.13301.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Int

from jrl.learners.accumulate import Loss, Objective, Rows, accumulate, optimizer_step, scan_steps, split_rows
from jrl.learners.ddpo_config import DDPOConfig
from jrl.learners.ddpo_loss_scale import LossScale, init_loss_scale, next_loss_scale, scale_cotangents
from jrl.learners.ddpo_objective import (
    charge_later_kl,
    ddpo_objective,
    recompute_logprobs,
    rows_of_batch,
)
from jrl.learners.ddpo_order import microbatches, shuffled_order
from jrl.learners.state import TrainState, init_train_state
from jrl.mesh import hold_split
from jrl.ops.flow_schedule import Schedule
from jrl.ops.metrics import reduce_metrics
from jrl.typing import DDPOBatch, DenoiserFns, Frozen, Max, Mean, Metrics, Params, PRNGKey, Update

_FIRST = {
    "ddpo/ratio_max_dev": "ddpo/pre_update_ratio_max_dev",
    "ddpo/clip_fraction": "ddpo/pre_update_clip_fraction",
}
"""Metrics that are also reported of the first optimizer step alone: no parameter has changed before it."""
_RECOMPUTED = "ddpo/recomputed_logprob_max_dev"
"""How far log-probabilities computed anew are from the sampler's, which no ratio shows any more."""


@struct.dataclass
class DDPOState:
    """All that DDPO carries from one epoch to the next.

    Attributes:
      train: Parameters and optimizer.
      ema: Average of the parameters over optimizer steps; None: not kept.
      loss_scale: Of float16 training; None: no scaling.
    """

    train: TrainState
    ema: Params | None
    loss_scale: LossScale | None


def init_ddpo_state(params: Params, optimizer: optax.GradientTransformation, config: DDPOConfig) -> DDPOState:
    """State before the first step.

    Args:
      params: What trains, in float32.
      optimizer: From `make_optimizer`.
      config: Says whether there are an average and a loss scale.
    """
    return DDPOState(
        train=init_train_state(params, optimizer),
        # Buffers of its own: state is donated.
        ema=jax.tree.map(jnp.copy, params) if config.ema_decay else None,
        loss_scale=init_loss_scale(config.loss_scaling) if config.loss_scaling else None,
    )


def make_ddpo_update(
    model: DenoiserFns,
    schedule: Schedule,
    optimizer: optax.GradientTransformation,
    config: DDPOConfig,
    *,
    batch_size: int,
    minibatch_size: int,
) -> Update:
    """Builds the update of a DDPO epoch: all passes over all denoising steps of all samples, in one compiled call.

    An optimizer step averages over `batch_size · T'` denoising steps, of `batch_size` samples. Old log-probabilities
    are those from before the first step, in every pass.

    Args:
      model: The denoiser.
      schedule: Of the model.
      optimizer: From `make_optimizer`.
      config: Of the method.
      batch_size: Samples of an optimizer step, over all devices.
      minibatch_size: Samples of a microbatch, which takes one denoising step of each; must divide `batch_size`.
    Returns:
      `(DDPOState, frozen, DDPOBatch, key, last_step=None) -> (DDPOState, metrics)`: `train_num_inner_epochs · ceil(N /
      batch_size)` optimizer steps, none behind `last_step`, the counter of the state after the run's last one. The key
      chooses orders, and the steps where fewer than all are trained.
    Raises:
      ValueError: If `minibatch_size` does not divide `batch_size`, or a step has no density.
    """
    split_rows(batch_size, batch_size=batch_size, minibatch_size=minibatch_size)
    steps = schedule.steps(config.sample_num_steps, config.sample_eta)
    _warn_of_guidance(config)
    objective = partial(ddpo_objective, model, steps=steps, schedule=schedule, config=config)
    options: dict[str, Any] = {
        "steps": steps,
        "schedule": schedule,
        "config": config,
        "minibatch_size": minibatch_size,
    }

    def update(
        state: DDPOState,
        frozen: Frozen,
        batch: DDPOBatch,
        key: PRNGKey,
        last_step: Int[Array, ""] | None = None,
    ) -> tuple[DDPOState, Metrics]:
        _check_batch(batch, num_steps=config.sample_num_steps)
        extra: Metrics = {}
        if config.old_log_probs == "recompute":
            sampled = batch
            batch = recompute_logprobs(model, state.train.params, frozen, sampled, **options)
            extra[_RECOMPUTED] = Max(
                jnp.max(jnp.abs(batch.trajectories.logprobs - sampled.trajectories.logprobs))
            )

        if config.kl_to_go:
            batch = charge_later_kl(model, state.train.params, frozen, batch, **options)

        def of_rows(params: Params, rows: Rows) -> Loss:
            return objective(params, hold_split(frozen, rows), rows_of_batch(batch, rows))

        def step(state: DDPOState, rows: Rows) -> tuple[DDPOState, Metrics]:
            return _step(state, optimizer, of_rows, rows, config)

        order = shuffled_order(key, batch.advantages.shape[0], config)
        laid_out = microbatches(
            order, num_steps=config.sample_num_steps, batch_size=batch_size, minibatch_size=minibatch_size
        )
        left = None if last_step is None else last_step - state.train.step
        state, stacked = scan_steps(step, state, laid_out, left=left)
        return state, _metrics_of_steps(stacked) | extra

    return update


def _step(
    state: DDPOState,
    optimizer: optax.GradientTransformation,
    objective: Objective,
    rows: Rows,
    config: DDPOConfig,
) -> tuple[DDPOState, Metrics]:
    """Takes an optimizer step, and moves the loss scale after it."""
    scale = state.loss_scale

    def scaled(params: Params, rows: Rows) -> Loss:
        if scale is None:
            return objective(params, rows)
        # Scaled between loss and parameters alone; what comes out on either side is not.
        loss_sum, weight, metrics = objective(scale_cotangents(params, 1.0 / scale.factor), rows)
        return scale_cotangents(loss_sum, scale.factor), weight, metrics

    train, metrics = optimizer_step(state.train, optimizer, accumulate(scaled, state.train.params, rows))
    ema = state.ema
    if ema is not None:
        ema = optax.incremental_update(train.params, ema, 1.0 - config.ema_decay)
    if scale is not None:
        finite = train.opt_state.last_finite
        metrics["ddpo/loss_scale"] = Mean(scale.factor, jnp.ones((), jnp.float32))
        scale = next_loss_scale(scale, finite, growth_every=config.loss_scaling_growth_every)
    return DDPOState(train=train, ema=ema, loss_scale=scale), metrics


def _metrics_of_steps(stacked: Metrics) -> Metrics:
    """Metrics of all optimizer steps as one, and some of the first step alone."""
    first: Metrics = {late: jax.tree.map(lambda x: x[0], stacked[name]) for name, late in _FIRST.items()}
    return reduce_metrics(stacked) | first


def _check_batch(batch: DDPOBatch, *, num_steps: int) -> None:
    """Raises ValueError unless the trajectories have as many steps as the configuration."""
    found = batch.trajectories.logprobs.shape[1]
    if found != num_steps:
        raise ValueError(
            f"`batch.trajectories` must have `sample_num_steps` = {num_steps} steps, got {found}. "
            "Were they sampled with another configuration?"
        )


def _warn_of_guidance(config: DDPOConfig) -> None:
    if config.sample_guidance_scale > 1 and not config.train_cfg:
        warnings.warn(
            f"`method.train_cfg` is False, but sampling guides with {config.sample_guidance_scale}: the update trains "
            "another policy than the one that acts, and probability ratios do not start at 1.",
            stacklevel=3,
        )
