# SPDX-License-Identifier: Apache-2.0
"""The sampling call of a diffusion model that is planned: of shapes alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jrl.learners.diffusion_config import DiffusionConfig
from jrl.ops.flow_schedule import Schedule
from jrl.trainers.diffusion.ddpo_sampling import diffusing_program
from jrl.trainers.plan.model_part import DiffusionShapes
from jrl.trainers.programs import Program, array_of, key_on, rows_on, weights_on


class PlannedSampling(NamedTuple):
    """A sampling call.

    Attributes:
      program: Its program; the first of what it returns are the trajectories.
      negative: Shape of the negative prompt's context.
      schedule: Of the model at the size of the images.
    """

    program: Program
    negative: Any
    schedule: Schedule


def planned_sampling(
    method: DiffusionConfig, shapes: DiffusionShapes, mesh: Mesh, *, rows: int
) -> PlannedSampling:
    """The sampling call of a run.

    Args:
      method: How to sample.
      shapes: The model.
      mesh: Where it is.
      rows: Of a call, over all devices.
    Raises:
      ValueError: If the images have a size that the model cannot draw.
    """
    latent_shape = shapes.model.latent_shape(method.sample_height, method.sample_width)
    model = shapes.model.at_size(latent_shape)
    program = diffusing_program(
        shapes.denoiser, model.schedule, method, mesh=mesh, latent_shape=latent_shape, rows=rows
    )
    width = model.tokenizer([""]).shape[1]
    tokens, empty = (array_of(count, width, dtype=jnp.int32) for count in (rows, 1))
    numbers = rows_on(mesh, array_of(rows, dtype=jnp.int32))
    params, frozen = weights_on(mesh, shapes.params), weights_on(mesh, shapes.frozen)
    negative = rows_on(mesh, jax.eval_shape(shapes.denoiser.encode, shapes.frozen, empty))
    arguments = params, frozen, rows_on(mesh, tokens), negative, key_on(mesh), numbers, numbers
    return PlannedSampling(Program("sample", program, arguments), negative, model.schedule)
