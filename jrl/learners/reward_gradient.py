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
import optax
from jaxtyping import Array, Float

from jrl.learners.accumulate import (
    Loss,
    Rows,
    accumulate,
    batch_in_order,
    optimizer_step,
    split_rows,
    take_rows,
)
from jrl.learners.reward_gradient_config import RewardGradientConfig
from jrl.learners.state import TrainState
from jrl.mesh import hold_split
from jrl.ops.ddim import ddim_mean, steps_of_rows
from jrl.ops.denoising import guided_output
from jrl.ops.flow_schedule import Schedule
from jrl.ops.metrics import mean_metric
from jrl.typing import (
    DenoiserFns,
    DifferentiableReward,
    Frozen,
    Metrics,
    Params,
    PRNGKey,
    RewardGradientBatch,
    Trajectories,
    Update,
)

REWARD = "reward"
"""Key of the reward's weights among what does not train."""

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
    model, guidance_scale = model.at_guidance(guidance_scale)
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


def make_reward_gradient_update(
    model: DenoiserFns,
    reward: DifferentiableReward,
    schedule: Schedule,
    optimizer: optax.GradientTransformation,
    config: RewardGradientConfig,
    *,
    batch_size: int,
    minibatch_size: int,
) -> Update:
    """Builds the update of an iteration: one optimizer step that raises the rewards of sampled images.

    Args:
      model: The denoiser.
      reward: What is raised; its weights are `frozen["reward"]`.
      schedule: Of the model.
      optimizer: From `make_optimizer`.
      config: Of the method.
      batch_size: Most images of a step, over all devices.
      minibatch_size: Images of a microbatch; must divide `batch_size`.
    Returns:
      `(TrainState, frozen, RewardGradientBatch, key) -> (TrainState, metrics)`; the key is not used, for nothing is
      drawn: the images were sampled with the state's own parameters.
    Raises:
      ValueError: If `minibatch_size` does not divide `batch_size`.
    """
    split_rows(batch_size, batch_size=batch_size, minibatch_size=minibatch_size)

    def update(
        state: TrainState, frozen: Frozen, batch: RewardGradientBatch, key: PRNGKey
    ) -> tuple[TrainState, Metrics]:
        del key
        if batch.trajectories.logprobs.shape[1] != config.sample_num_steps:
            raise ValueError(
                f"`batch.trajectories` must have `sample_num_steps` = {config.sample_num_steps} steps, got "
                f"{batch.trajectories.logprobs.shape[1]}. Were they sampled with another configuration?"
            )

        def objective(params: Params, rows: Rows) -> Loss:
            held = hold_split(frozen, rows)
            trajectories, conditions = take_rows((batch.trajectories, batch.conditions), rows.ids)
            return reward_gradient_loss(
                model,
                params,
                held,
                trajectories,
                batch.negative,
                lambda images: reward.score(held[REWARD], images, conditions),
                schedule=schedule,
                eta=config.sample_eta,
                num_last_steps=config.num_last_steps,
                guidance_scale=config.sample_guidance_scale,
                guidance_rescale=config.guidance_rescale,
            )

        num_rows = batch.trajectories.latents.shape[0]
        stacks = batch_in_order(
            num_rows, batch_size=batch_size, minibatch_size=minibatch_size, unit="images", padded=False
        )
        return optimizer_step(state, optimizer, accumulate(objective, state.params, *stacks))

    return update
