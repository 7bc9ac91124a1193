# SPDX-License-Identifier: Apache-2.0
"""One step of DDIM as a Gaussian policy: its mean, a sample of it, and the sample's log-density.

State = (prompt, t, x_t), action = x_p with p the timestep after t, policy = N(μ, σ_t²) for η > 0. Always float32,
whatever the network's dtype: the trust region of DDPO is about 1e-4 wide.

Reference: Song et al. 2021, arXiv:2010.02502, eqs. 12 and 16; as a policy Black et al. 2023, arXiv:2305.13301.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jrl.ops.checks import check_same_shape
from jrl.ops.gaussian import gaussian_logprob
from jrl.ops.noise_schedule import DenoisingSteps, NoiseSchedule
from jrl.ops.predictions import PREDICTIONS


class DDIMStep(NamedTuple):
    """What a step gives.

    Attributes:
      next_latents: x_p, where the next step begins.
      logprobs: Mean log-density of an element of x_p, in nats; 0 for η = 0, where there is none.
    """

    next_latents: Float[Array, "B Y X C"]
    logprobs: Float[Array, "B"]


def steps_of_rows(steps: DenoisingSteps, ids: Int[Array, "B"]) -> DenoisingSteps:
    """Each row's own step.

    Args:
      steps: All T.
      ids: Number of the step, in [0, T).
    """
    return DenoisingSteps(*(jnp.take(jnp.asarray(x), ids, axis=0) for x in steps))


def step_of_timesteps(steps: DenoisingSteps, timesteps: Int[Array, "B"]) -> Int[Array, "B"]:
    """Number of the step that begins at each timestep; 0 for a timestep that no step begins at."""
    return jnp.argmax(timesteps[:, None] == jnp.asarray(steps.timesteps)[None, :], axis=1).astype(jnp.int32)


def ddim_mean(
    latents: Float[Array, "B Y X C"],
    output: Float[Array, "B Y X C"],
    at: DenoisingSteps,
    *,
    schedule: NoiseSchedule,
    use_clipped_model_output: bool = False,
) -> Float[Array, "B Y X C"]:
    """Where the step goes on average.

        μ = √ᾱ_p·x̂0 + √(1 − ᾱ_p − σ_t²)·ε̂

    Args:
      latents: x_t.
      output: Of the network, guidance included; x̂0 and ε̂ follow from it as `schedule.prediction_type` says.
      at: Each row's step, from `steps_of_rows`.
      schedule: Says what the output is, and how the predicted clean latents x̂0 are clipped.
      use_clipped_model_output: Whether ε̂ is computed anew from clipped x̂0.
    Raises:
      ValueError: If the output has another shape than the latents.
    """
    check_same_shape("output", output, "latents", latents)
    each = _per_element(at)
    clean, noise = PREDICTIONS[schedule.prediction_type](latents, output, each.signal, each.noise)
    if schedule.thresholding:
        clean = dynamic_threshold(
            clean, quantile=schedule.dynamic_thresholding_ratio, largest=schedule.sample_max_value
        )
    elif schedule.clip_sample:
        clean = jnp.clip(clean, -schedule.clip_sample_range, schedule.clip_sample_range)
    if use_clipped_model_output:
        noise = (latents - each.signal * clean) / each.noise
    return each.next_signal * clean + each.direction * noise


def ddim_step(
    latents: Float[Array, "B Y X C"],
    output: Float[Array, "B Y X C"],
    noise: Float[Array, "B Y X C"],
    at: DenoisingSteps,
    *,
    schedule: NoiseSchedule,
    use_clipped_model_output: bool = False,
) -> DDIMStep:
    """A sample of the step, x_p = μ + σ_t·z, and its log-density.

    Args:
      latents: x_t.
      output: Of the network, guidance included.
      noise: z, standard normal.
      at: Each row's step.
      schedule: See `ddim_mean`.
      use_clipped_model_output: See `ddim_mean`.
    """
    check_same_shape("noise", noise, "latents", latents)
    mean = ddim_mean(
        latents, output, at, schedule=schedule, use_clipped_model_output=use_clipped_model_output
    )
    next_latents = mean + _per_element(at).std * noise
    return DDIMStep(next_latents, ddim_logprob(next_latents, mean, at))


def ddim_logprob(
    next_latents: Float[Array, "B Y X C"], mean: Float[Array, "B Y X C"], at: DenoisingSteps
) -> Float[Array, "B"]:
    """Mean log-density of an element of x_p under the step, in nats: see `jrl.ops.gaussian.gaussian_logprob`.

    No gradient flows into x_p: it was the action. For η = 0 there is no density, and 0 stands in its place.
    """
    # Before the division by σ: a gradient through the branch not taken would be NaN.
    std = jnp.where(at.std > 0, at.std, jnp.ones_like(at.std))
    logprobs = gaussian_logprob(jax.lax.stop_gradient(next_latents), mean, std)
    return jnp.where(at.std > 0, logprobs, jnp.zeros_like(logprobs))


def dynamic_threshold(
    clean: Float[Array, "B Y X C"], *, quantile: float, largest: float
) -> Float[Array, "B Y X C"]:
    """Each row clipped to ±s and divided by s, where s is a quantile of its absolute values, kept in [1, largest].

    Args:
      clean: Predicted clean latents.
      quantile: In [0, 1]; 0.995 is usual.
      largest: Most that s may be.
    Reference: Saharia et al. 2022 (Imagen), arXiv:2205.11487, section 2.3.
    """
    sizes = jnp.abs(clean).reshape(clean.shape[0], -1)
    threshold = jnp.clip(jnp.quantile(sizes, quantile, axis=1), 1.0, largest)[:, None, None, None]
    return jnp.clip(clean, -threshold, threshold) / threshold


def _per_element(at: DenoisingSteps) -> DenoisingSteps:
    """Coefficients of rows, fit to be multiplied with latents."""
    return DenoisingSteps(*(x[:, None, None, None] for x in at))
