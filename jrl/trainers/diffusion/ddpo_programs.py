# SPDX-License-Identifier: Apache-2.0
"""Compiled calls of a DDPO run: sampling and update; what `jrl plan --compile` compiles of them."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jrl.learners.ddpo import init_ddpo_state, make_ddpo_update
from jrl.learners.ddpo_config import DDPOConfig
from jrl.ops.flow_schedule import Schedule
from jrl.trainers.config.trl_config import TRLConfig
from jrl.trainers.diffusion.planned_sampling import planned_sampling
from jrl.trainers.loop.run import ends_within_iteration
from jrl.trainers.plan.model_part import DiffusionShapes
from jrl.trainers.programs import Program, array_of, number_on, optimizer_of, update_program
from jrl.typing import DDPOBatch, DenoiserFns, Update


def ddpo_programs(
    config: TRLConfig, method: DDPOConfig, shapes: DiffusionShapes, mesh: Mesh
) -> list[Program]:
    """Sampling call and update of an epoch.

    Args:
      config: The run's.
      method: Its section of the algorithm.
      shapes: The model.
      mesh: Where it is.
    Raises:
      ValueError: If no update can be made of the configuration.
    """
    check_sizes(config, method)
    sample, negative, schedule = planned_sampling(method, shapes, mesh, rows=method.sample_batch_size)
    count = method.num_samples
    trajectories = jax.tree.map(lambda x: array_of(count, *x.shape[1:], dtype=x.dtype), sample.result()[0])
    batch = DDPOBatch(trajectories, negative, array_of(count), array_of(count, dtype=jnp.bool_))
    optimizer = optimizer_of(config)
    update = make_update(config, method, shapes.denoiser, schedule, optimizer)
    init = partial(init_ddpo_state, optimizer=optimizer, config=method)
    steps, train = steps_per_epoch(config, method), config.train
    is_cut = ends_within_iteration(train.total_steps, steps_per_iteration=steps, max_iterations=train.epochs)
    last_step = number_on(mesh, jnp.int32) if is_cut else None
    return [sample, update_program(shapes, mesh, init, update, batch, last_step, rounds=steps)]


def check_sizes(config: TRLConfig, method: DDPOConfig) -> None:
    """Refuses a configuration that no update can be made of.

    Args:
      config: The run's.
      method: Its section of the algorithm.
    Raises:
      ValueError: If batches do not divide an epoch, or float16 is not scaled.
    """
    train = config.train
    if method.num_samples % train.batch_size:
        raise ValueError(
            f"`train.batch_size` must divide the samples of an epoch, `method.sample_batch_size` * "
            f"`method.sample_num_batches_per_epoch` = {method.num_samples}, got {train.batch_size}."
        )
    if train.compute_dtype == "float16" and not method.loss_scaling:
        raise ValueError(
            "`method.loss_scaling` must be positive where `train.compute_dtype` is float16 (4096 is a good one), "
            "got 0: gradients of its images are smaller than its smallest numbers."
        )


def make_update(
    config: TRLConfig,
    method: DDPOConfig,
    denoiser: DenoiserFns,
    schedule: Schedule,
    optimizer: optax.GradientTransformation,
) -> Update:
    """The update of an epoch, as a configuration asks for it."""
    return make_ddpo_update(
        denoiser,
        schedule,
        optimizer,
        method,
        batch_size=config.train.batch_size,
        minibatch_size=config.train.rows_per_pass,
    )


def steps_per_epoch(config: TRLConfig, method: DDPOConfig) -> int:
    """Optimizer steps of an epoch."""
    return method.train_num_inner_epochs * (method.num_samples // config.train.batch_size)
