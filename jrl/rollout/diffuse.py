# SPDX-License-Identifier: Apache-2.0
"""Sampling from a diffusion model: the whole denoising loop and the decoding of its images in one compiled call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jrl.mesh import constrain_rows, gather_fsdp, rows_parts
from jrl.ops.ddim import DDIMStep, ddim_step, steps_of_rows
from jrl.ops.denoising import guided_output
from jrl.ops.flow_schedule import Schedule
from jrl.ops.noise_schedule import DenoisingSteps
from jrl.typing import DenoiserFns, Frozen, Params, PRNGKey, Trajectories

NoiseAt = Callable[[Int[Array, ""]], Float[Array, "B Y X C"]]
"""Fresh noise of all rows, by the number of the step."""


class Diffuse(Protocol):
    """A sampler of images."""

    def __call__(
        self,
        params: Params,
        frozen: Frozen,
        tokens: Int[Array, "B Q"],
        negative: Float[Array, "1 Q D"],
        initial_keys: PRNGKey,
        step_keys: PRNGKey,
    ) -> tuple[Trajectories, Float[Array, "B Z W 3"]]:
        """Samples one image a prompt."""
        ...


def make_diffuse(
    model: DenoiserFns,
    schedule: Schedule,
    *,
    num_steps: int,
    eta: float,
    guidance_scale: float,
    guidance_rescale: float,
    latent_shape: tuple[int, int, int],
    decode_rows: int = 8,
) -> Diffuse:
    """A sampler with these settings; the caller jits it.

    The first noise of row i is drawn with `initial_keys[i]`, that of step s with `fold_in(step_keys[i], s)`: an image
    depends neither on the row's neighbours, nor on the order in which rows come, nor on the mesh. Rows with the same
    initial key start from the same noise.

    Args:
      model: The denoiser and what stands around it.
      schedule: Of the checkpoint.
      num_steps: T.
      eta: η in [0, 1], or a flow's noise level; 0, for evaluation, draws nothing after the first noise, and
        log-probabilities are 0.
      guidance_scale: w; at most 1: no guidance. A network that is told its scale is told this one.
      guidance_rescale: φ; see `jrl.ops.denoising.guided_output`.
      latent_shape: (height, width, channels) of the latents.
      decode_rows: Images decoded at a time on each device.
    Returns:
      `(params, frozen, tokens, negative, initial_keys, step_keys) -> (Trajectories, images)`; keys are one a row.
    Raises:
      ValueError: If the steps are not possible; see the schedule's `steps`.
    """
    steps = schedule.steps(num_steps, eta)

    def diffuse(
        params: Params,
        frozen: Frozen,
        tokens: Int[Array, "B Q"],
        negative: Float[Array, "1 Q D"],
        initial_keys: PRNGKey,
        step_keys: PRNGKey,
    ) -> tuple[Trajectories, Float[Array, "B Z W 3"]]:
        # Outside the loop, from weights that are split: a text encoder may be larger than the denoiser.
        context = model.encode(frozen, tokens)
        params, frozen = gather_fsdp(params), gather_fsdp(frozen)
        draw = partial(jax.random.normal, shape=latent_shape)

        def noise_at(step: Int[Array, ""]) -> Float[Array, "B Y X C"]:
            return jax.vmap(lambda key: draw(jax.random.fold_in(key, step)))(step_keys)

        trajectories = denoise(
            model,
            params,
            frozen,
            context,
            negative,
            jax.vmap(draw)(initial_keys),
            noise_at,
            steps=steps,
            schedule=schedule,
            guidance_scale=guidance_scale,
            guidance_rescale=guidance_rescale,
        )
        clean = trajectories.latents[:, -1]
        return trajectories, decode_in_chunks(partial(model.decode, frozen), clean, decode_rows=decode_rows)

    return diffuse


def denoise(
    model: DenoiserFns,
    params: Params,
    frozen: Frozen,
    context: Float[Array, "B Q D"],
    negative: Float[Array, "1 Q D"],
    initial: Float[Array, "B Y X C"],
    noise_at: NoiseAt,
    *,
    steps: DenoisingSteps,
    schedule: Schedule,
    guidance_scale: float,
    guidance_rescale: float,
) -> Trajectories:
    """All steps from given noise.

    Args:
      model: The denoiser.
      params: What trains of it.
      frozen: The rest.
      context: Of the prompts.
      negative: Of the negative prompt.
      initial: x_T, standard normal.
      noise_at: z of every step.
      steps: Of the schedule.
      schedule: Of the model.
      guidance_scale: w.
      guidance_rescale: φ.
    """
    num_steps = len(steps.timesteps)
    num_rows = initial.shape[0]
    model, guidance_scale = model.at_guidance(guidance_scale)
    predict = partial(model.predict, params, frozen)
    context = constrain_rows(context)

    def step(latents: Array, number: Int[Array, ""]) -> tuple[Array, DDIMStep]:
        at = steps_of_rows(steps, jnp.full((num_rows,), number))
        output = guided_output(
            predict,
            latents,
            at.timesteps,
            context,
            negative,
            guidance_scale=guidance_scale,
            guidance_rescale=guidance_rescale,
        )
        taken = ddim_step(latents, output, noise_at(number), at, schedule=schedule)
        taken = taken._replace(next_latents=constrain_rows(taken.next_latents))
        return taken.next_latents, taken

    initial = constrain_rows(initial)
    _, taken = jax.lax.scan(step, initial, jnp.arange(num_steps, dtype=jnp.int32))
    latents = jnp.concatenate([initial[:, None], taken.next_latents.swapaxes(0, 1)], axis=1)
    return Trajectories(constrain_rows(latents), constrain_rows(taken.logprobs.T), context)


def decode_in_chunks(
    decode: Callable[[Array], Array], latents: Float[Array, "B Y X C"], *, decode_rows: int
) -> Float[Array, "B Z W 3"]:
    """Images of all rows, so many at a time on each device: a decoder's activations are far larger than its images.

    Args:
      decode: Of any number of rows.
      latents: Clean latents.
      decode_rows: Rows of one call on one device.
    """
    mesh = jax.sharding.get_abstract_mesh()
    most = decode_rows * rows_parts(mesh)
    num_rows = latents.shape[0]
    count = -(-num_rows // most)
    if count == 1:
        return constrain_rows(decode(latents))
    rows = -(-num_rows // count)
    padded = jnp.pad(latents, ((0, rows * count - num_rows), (0, 0), (0, 0), (0, 0)), mode="edge")
    # A chunk takes every `count`-th row, so it has some of every device, and its images stay where its rows are.
    chunks = padded.reshape(rows, count, *latents.shape[1:]).swapaxes(0, 1)
    images = jax.lax.map(lambda chunk: decode(constrain_rows(chunk)), chunks)
    flat = images.swapaxes(0, 1).reshape(rows * count, *images.shape[2:])[:num_rows]
    return constrain_rows(flat)
