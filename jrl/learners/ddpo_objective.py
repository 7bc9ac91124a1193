# SPDX-License-Identifier: Apache-2.0
"""DDPO's loss of single denoising steps, and their log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jrl.learners.accumulate import Loss, Rows, take_rows
from jrl.learners.ddpo_config import DDPOConfig
from jrl.learners.forward import map_rows
from jrl.losses.ddpo import ddpo_loss
from jrl.mesh import hold_split
from jrl.ops.ddim import ddim_logprob, ddim_mean, steps_of_rows
from jrl.ops.denoising import Predict, guided_output
from jrl.ops.flow_schedule import Schedule
from jrl.ops.gaussian import gaussian_kl
from jrl.ops.masking import masked_mean
from jrl.ops.noise_schedule import DenoisingSteps
from jrl.typing import DDPOBatch, DenoiserFns, Frozen, Params


class DenoisingRows(NamedTuple):
    """Single denoising steps to train on, one a row.

    Attributes:
      latents: x_t.
      next_latents: x_p, the action.
      steps: Number of the step in its trajectory.
      old_logprobs: Of the action under the policy that took it.
      advantages: Of the sample, or under `kl_to_go` of the step.
      context: Of its prompt.
      negative: Context of the negative prompt, the same for all rows.
      valid: False on padding and on samples that are left out.
    """

    latents: Float[Array, "B Y X C"]
    next_latents: Float[Array, "B Y X C"]
    steps: Int[Array, "B"]
    old_logprobs: Float[Array, "B"]
    advantages: Float[Array, "B"]
    context: Float[Array, "B Q D"]
    negative: Float[Array, "1 Q D"]
    valid: Bool[Array, "B"]


def rows_of_batch(batch: DDPOBatch, rows: Rows) -> DenoisingRows:
    """The denoising steps of these ids, which are sample · T + step, kept spread over the mesh's batch axes."""
    latents, logprobs, context = batch.trajectories
    num_samples, num_steps = logprobs.shape
    sample, step = rows.ids // num_steps, rows.ids % num_steps
    states = latents.reshape(num_samples * (num_steps + 1), *latents.shape[2:])
    first = sample * (num_steps + 1) + step
    return DenoisingRows(
        latents=take_rows(states, first),
        next_latents=take_rows(states, first + 1),
        steps=step,
        old_logprobs=take_rows(logprobs.reshape(-1), rows.ids),
        advantages=take_rows(
            batch.advantages.reshape(-1), sample if batch.advantages.ndim == 1 else rows.ids
        ),
        context=take_rows(context, sample),
        negative=batch.negative,
        valid=rows.valid if batch.valid is None else rows.valid & take_rows(batch.valid, sample),
    )


def guided_means(
    model: DenoiserFns, schedule: Schedule, config: DDPOConfig
) -> tuple[DenoiserFns, Callable[[Predict, DenoisingRows, DenoisingSteps], Float[Array, "B Y X C"]]]:
    """(the model, μ of each row under one of its networks), guided as the update guides."""
    model, scale = model.at_guidance(config.sample_guidance_scale if config.train_cfg else 1.0)

    def step_means(predict: Predict, rows: DenoisingRows, at: DenoisingSteps) -> Float[Array, "B Y X C"]:
        output = guided_output(
            predict,
            rows.latents,
            at.timesteps,
            rows.context,
            rows.negative,
            guidance_scale=scale,
            guidance_rescale=config.guidance_rescale,
        )
        return ddim_mean(rows.latents, output, at, schedule=schedule)

    return model, step_means


def ddpo_objective(
    model: DenoiserFns,
    params: Params,
    frozen: Frozen,
    rows: DenoisingRows,
    *,
    steps: DenoisingSteps,
    schedule: Schedule,
    config: DDPOConfig,
) -> Loss:
    """The loss of single denoising steps, to be differentiated with respect to `params`: (sum, weight, metrics).

    Args:
      model: The denoiser.
      params: Its trainable parameters.
      frozen: The rest.
      rows: What to train on.
      steps: Of the schedule, those that sampled.
      schedule: Of the model.
      config: Of the method.
    """
    at = steps_of_rows(steps, rows.steps)
    model, means = guided_means(model, schedule, config)
    mean = means(partial(model.predict, params, frozen), rows, at)
    kl = None
    if config.beta_kl:
        ref_mean = jax.lax.stop_gradient(means(partial(model.reference, frozen), rows, at))
        kl = gaussian_kl(mean, ref_mean, at.std)
    out = ddpo_loss(
        ddim_logprob(rows.next_latents, mean, at),
        rows.old_logprobs,
        rows.advantages,
        rows.valid,
        clip_range=config.train_clip_range,
        advantage_clip=config.train_adv_clip_max,
        kl=kl,
        beta_kl=config.beta_kl,
    )
    return out.loss_sum, out.weight, out.metrics


def recompute_logprobs(
    model: DenoiserFns,
    params: Params,
    frozen: Frozen,
    batch: DDPOBatch,
    *,
    steps: DenoisingSteps,
    schedule: Schedule,
    config: DDPOConfig,
    minibatch_size: int,
) -> DDPOBatch:
    """The batch with log-probabilities computed anew, in the shapes and the way in which the update computes them.

    Steps that are never trained on keep the sampler's.
    """
    num_samples, num_steps = batch.trajectories.logprobs.shape
    trained = jnp.asarray(config.trained_steps, jnp.int32)
    model, means = guided_means(model, schedule, config)

    def score(index: Int[Array, "R"]) -> Float[Array, "R"]:
        ids = index // len(config.trained_steps) * num_steps + trained[index % len(config.trained_steps)]
        rows = rows_of_batch(batch, Rows(ids, jnp.ones_like(ids, bool)))
        at = steps_of_rows(steps, rows.steps)
        predict = partial(model.predict, params, hold_split(frozen, ids))
        return ddim_logprob(rows.next_latents, means(predict, rows, at), at)

    found = map_rows(score, num_samples * len(config.trained_steps), minibatch_size=minibatch_size)
    logprobs = batch.trajectories.logprobs.at[:, trained].set(found.reshape(num_samples, -1))
    return batch._replace(trajectories=batch.trajectories._replace(logprobs=logprobs))


def charge_later_kl(
    model: DenoiserFns,
    params: Params,
    frozen: Frozen,
    batch: DDPOBatch,
    *,
    steps: DenoisingSteps,
    schedule: Schedule,
    config: DDPOConfig,
    minibatch_size: int,
) -> DDPOBatch:
    """The batch with an advantage for each step: the sample's, less β times the KL of the steps after it.

    The loss charges a step with its own KL alone. A step also decides where later ones begin, and so what they cost:
    without that, the gradient is not the one of E[r] − β·KL, and its optimum is not p·exp(r/β). Costs are those of the
    whole latents, as log-densities' gradients are, and centred over the samples.

    Args:
      model: The denoiser.
      params: Its parameters as they sampled.
      frozen: The rest.
      batch: With one advantage a sample.
      steps: Those that sampled.
      schedule: Of the model.
      config: Of the method.
      minibatch_size: Rows of a forward pass.
    """
    num_samples, num_steps = batch.trajectories.logprobs.shape
    model, means = guided_means(model, schedule, config)

    def costs(ids: Int[Array, "R"]) -> Float[Array, "R"]:
        rows = rows_of_batch(batch, Rows(ids, jnp.ones_like(ids, bool)))
        at = steps_of_rows(steps, rows.steps)
        held = hold_split(frozen, ids)
        mean = means(partial(model.predict, params, held), rows, at)
        return gaussian_kl(mean, means(partial(model.reference, held), rows, at), at.std)

    found = map_rows(costs, num_samples * num_steps, minibatch_size=minibatch_size)
    size = batch.trajectories.latents[0, 0].size
    kl = size * found.reshape(num_samples, num_steps)
    later = jnp.cumsum(kl[:, ::-1], axis=1)[:, ::-1] - kl
    valid = jnp.ones(num_samples, bool) if batch.valid is None else batch.valid
    mean = jax.vmap(masked_mean, in_axes=(1, None))(later, valid)
    return batch._replace(advantages=batch.advantages[:, None] - config.beta_kl * (later - mean[None]))
