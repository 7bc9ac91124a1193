# SPDX-License-Identifier: Apache-2.0
"""Gradients of a differentiable reward through the last denoising steps (DRaFT).

Where a reward can be differentiated, its own gradient says more than the score-function estimate of DDPO. Through all
steps it costs the memory of all of them, and explodes: the last one to few carry most of what a reward sees.

Reference: Clark et al. 2024, arXiv:2309.17400 (DRaFT-K); random truncation: Prabhudesai et al. 2023, arXiv:2310.03739.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jrl.learners.accumulate import Loss
from jrl.ops.ddim import ddim_mean, steps_of_rows
from jrl.ops.denoising import guided_output
from jrl.ops.flow_schedule import Schedule
from jrl.ops.metrics import mean_metric
from jrl.typing import DenoiserFns, Frozen, Metrics, Params, Trajectories

ImageReward = Callable[[Float[Array, "B Z W 3"]], Float[Array, "B"]]
"""Images in [0, 1] to rewards, in JAX."""


def reward_gradient_loss(
    model: DenoiserFns,
    params: Params,
    frozen: Frozen,
    trajectories: Trajectories,
    negative: Float[Array, "1 Q D"],
    reward: ImageReward,
    *,
    schedule: Schedule,
    eta: float,
    num_last_steps: int,
    guidance_scale: float,
    guidance_rescale: float = 0.0,
) -> Loss:
    """Minus the rewards of sampled images, differentiable in `params` through the last K steps: DRaFT-K.

    The steps are those that were sampled, x_p = μ_θ(x_t) + sg(x_p − μ_θ(x_t)): with the same noise, so the images are
    the sampled ones, while gradients flow through each μ and from step to step.

    Args:
      model: The denoiser.
      params: Its trainable parameters.
      frozen: The rest.
      trajectories: Sampled with these parameters; what came before the last K steps is taken as it is.
      negative: Context of the negative prompt.
      reward: What is maximised.
      schedule: Of the model.
      eta: η of the sampler; 0 for a deterministic one.
      num_last_steps: K in 1..T; 1 is usual.
      guidance_scale: w, as sampled.
      guidance_rescale: φ, likewise.
    Returns:
      Sum of −r over images, their number, and `reward/mean`.
    Raises:
      ValueError: If K is out of range.
    Reference: Clark et al. 2024, arXiv:2309.17400, algorithm 1.
    """
    count = trajectories.logprobs.shape[1]
    if not 1 <= num_last_steps <= count:
        raise ValueError(f"`num_last_steps` must be in 1..{count}, the steps sampled, got {num_last_steps}.")
    steps = schedule.steps(count, eta)
    states = jax.lax.stop_gradient(trajectories.latents)
    rows, first = states.shape[0], count - num_last_steps
    predict = partial(model.predict, params, frozen)
    latents = states[:, first]
    for number in range(first, count):
        at = steps_of_rows(steps, jnp.full((rows,), number))
        output = guided_output(
            predict,
            latents,
            at.timesteps,
            trajectories.context,
            negative,
            guidance_scale=guidance_scale,
            guidance_rescale=guidance_rescale,
        )
        mean = ddim_mean(latents, output, at, schedule=schedule)
        latents = mean + jax.lax.stop_gradient(states[:, number + 1] - mean)
    rewards = reward(model.decode(frozen, latents))
    metrics: Metrics = {
        "reward/mean": mean_metric(jax.lax.stop_gradient(rewards), jnp.ones_like(rewards, bool))
    }
    return -jnp.sum(rewards), jnp.float32(rows), metrics
