# SPDX-License-Identifier: Apache-2.0
"""Compiled calls of a reward-gradient run, and the activations of its update, as `jrl plan` asks for them.

No plan knows the reward, which is a function of the user's. The mean of all pixels stands in its place: it has neither
weights nor activations to speak of.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from jrl.learners.reward_gradient import REWARD, make_reward_gradient_update, reward_gradient_loss
from jrl.learners.reward_gradient_config import RewardGradientConfig
from jrl.learners.state import init_train_state
from jrl.mesh import rows_of_device
from jrl.models.cost import results_of_rows
from jrl.trainers.config.trl_config import TRLConfig
from jrl.trainers.diffusion.planned_sampling import planned_sampling
from jrl.trainers.plan.model_part import DiffusionShapes
from jrl.trainers.programs import Program, array_of, optimizer_of, update_program
from jrl.typing import DifferentiableReward, Params, RewardGradientBatch, Trajectories


def _mean_of_pixels(params: Params, images: jax.Array, conditions: Any) -> jax.Array:
    """The reward of a plan."""
    del params, conditions
    return images.mean(axis=(1, 2, 3))


def reward_gradient_programs(
    config: TRLConfig, method: RewardGradientConfig, shapes: DiffusionShapes, mesh: Mesh
) -> list[Program]:
    """Sampling call and update of an iteration.

    Args:
      config: The run's.
      method: Its section of the algorithm.
      shapes: The model.
      mesh: Where it is.
    Raises:
      ValueError: If no update can be made of the configuration.
    """
    train = config.train
    sample, negative, schedule = planned_sampling(method, shapes, mesh, rows=train.batch_size)
    batch = RewardGradientBatch(sample.result()[0], negative, {})
    optimizer = optimizer_of(config)
    update = make_reward_gradient_update(
        shapes.denoiser,
        DifferentiableReward(_mean_of_pixels),
        schedule,
        optimizer,
        method,
        batch_size=train.batch_size,
        minibatch_size=train.rows_per_pass,
    )
    with_reward = shapes.with_frozen({REWARD: {}})
    init = partial(init_train_state, optimizer=optimizer)
    return [sample, update_program(with_reward, mesh, init, update, batch)]


def reward_gradient_activations(
    config: TRLConfig, method: RewardGradientConfig, shapes: DiffusionShapes, mesh: Mesh
) -> int:
    """Bytes that a device keeps of a microbatch for the backward pass, through the decoder and the last K steps.

    They are the residuals of `jax.vjp` that grow with the rows; the compiler may keep fewer. Where a block of the
    denoiser is computed again (`train.remat`), only what goes into it is kept. Arrays count as whole over `tensor`.

    Args:
      config: The run's.
      method: Its section of the algorithm.
      shapes: The model.
      mesh: Where it is.
    """
    rows = config.train.rows_per_pass
    sample, negative, schedule = planned_sampling(method, shapes, mesh, rows=rows)
    trajectories = sample.result()[0]

    def of_steps(count: int) -> int:
        def trace(num_rows: int) -> Any:
            def kept(params: Any, frozen: Any, rows: Trajectories, negative: Any) -> Any:
                def loss(params: Any) -> jax.Array:
                    total, _, _ = reward_gradient_loss(
                        shapes.denoiser,
                        params,
                        frozen,
                        rows,
                        negative,
                        lambda images: _mean_of_pixels({}, images, {}),
                        schedule=schedule,
                        eta=method.sample_eta,
                        num_last_steps=count,
                        guidance_scale=method.sample_guidance_scale,
                        guidance_rescale=method.guidance_rescale,
                    )
                    return total

                return jax.vjp(loss, params)[1]

            given = jax.tree.map(lambda x: array_of(num_rows, *x.shape[1:], dtype=x.dtype), trajectories)
            empty = array_of(*negative.shape, dtype=negative.dtype)
            return jax.make_jaxpr(kept)(shapes.params, shapes.frozen, given, empty).jaxpr

        found = results_of_rows(trace, rows)
        whole = sum(count * math.prod(shape) * dtype.itemsize for (shape, dtype), count in found.items())
        return whole * rows_of_device(rows, mesh) // rows

    last = of_steps(1)
    if method.num_last_steps == 1:
        return last
    # Every step before the last ones is like the one behind it: tracing K of them would take K times as long.
    return last + (method.num_last_steps - 1) * (of_steps(2) - last)
