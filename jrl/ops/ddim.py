# SPDX-License-Identifier: Apache-2.0
"""A DDIM step as a Gaussian policy: its mean, a sample of it, and the sample's log-density.

State = (prompt, t, x_t), action = x_p with p the timestep after t, policy = N(μ, σ_t²) for η > 0. Always float32,
whatever the network's dtype: the trust region of DDPO is about 1e-4 wide. A step of a flow's SDE has the same form with
the coefficients of `jrl.ops.flow_schedule.flow_steps`, and at η = 0 it is Euler's step.

Reference: Song et al. 2021, arXiv:2010.02502, eqs. 12 and 16; as a policy Black et al. 2023, arXiv:2305.13301.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from jrl.ops.checks import check_same_floats
from jrl.ops.flow_schedule import Schedule
from jrl.ops.gaussian import gaussian_logprob
from jrl.ops.noise_schedule import DenoisingSteps, NoiseSchedule
from jrl.ops.predictions import PREDICTIONS


class DDIMStep(NamedTuple):
    """Result of a denoising step.

    Attributes:
      next_latents: x_p, where the next step begins.
      logprobs: Mean log-density of an element of x_p, in nats; 0 for η = 0, where there is none.
    """

    next_latents: Float[Array, "B Y X C"]
    logprobs: Float[Array, "B"]


def steps_of_rows(steps: DenoisingSteps, ids: Int[Array, "B"]) -> DenoisingSteps:
    """Selects each row's own step.

    Args:
      steps: All T.
      ids: Number of the step, in [0, T).
    Returns:
      The coefficients, one entry a row.
    Reference: none; indexing.
    Example:
      >>> steps = DenoisingSteps(jnp.array([601, 401, 201]), *(jnp.array([0.2, 0.4, 0.6]),) * 5)
      >>> steps_of_rows(steps, jnp.array([2, 0])).timesteps.tolist()
      [201, 601]
    """
    return DenoisingSteps(*(jnp.take(jnp.asarray(x), ids, axis=0) for x in steps))


def step_of_timesteps(steps: DenoisingSteps, timesteps: Num[Array, "B"]) -> Int[Array, "B"]:
    """Number of the step that begins at each timestep; 0 for a timestep that no step begins at.

    Args:
      steps: All T.
      timesteps: t of each row.
    Returns:
      Ids in [0, T).
    Reference: none; indexing.
    Example:
      >>> steps = DenoisingSteps(jnp.array([601, 401, 201]), *(jnp.array([0.2, 0.4, 0.6]),) * 5)
      >>> step_of_timesteps(steps, jnp.array([401, 201])).tolist()
      [1, 2]
    """
    return jnp.argmax(timesteps[:, None] == jnp.asarray(steps.timesteps)[None, :], axis=1).astype(jnp.int32)


def ddim_mean(
    latents: Float[Array, "B Y X C"],
    output: Float[Array, "B Y X C"],
    at: DenoisingSteps,
    *,
    schedule: Schedule,
    use_clipped_model_output: bool = False,
) -> Float[Array, "B Y X C"]:
    """Mean of the Gaussian from which a denoising step draws.

        μ = √ᾱ_p·x̂0 + √(1 − ᾱ_p − σ_t²)·ε̂

    Args:
      latents: x_t.
      output: Of the network, guidance included; x̂0 and ε̂ follow from it as `schedule.prediction_type` says.
      at: Each row's step, from `steps_of_rows`.
      schedule: Says what the output is, and how the predicted clean latents x̂0 are clipped.
      use_clipped_model_output: Whether ε̂ is computed anew from clipped x̂0.
    Returns:
      μ of each element, in units of the latents.
    Raises:
      ValueError: If the output has another shape than the latents.
    Reference: Song et al. 2021, arXiv:2010.02502, eq. 12 without its noise term.
    Example:
      >>> at = DenoisingSteps(*(jnp.array([x]) for x in (601, 0.6, 0.8, 0.8, 0.6, 0.0)))
      >>> latents, output = jnp.ones((1, 1, 1, 1)), jnp.full((1, 1, 1, 1), 0.5)  # x̂0 = (1 − 0.8·0.5)/0.6 = 1
      >>> round(float(ddim_mean(latents, output, at, schedule=NoiseSchedule(clip_sample=False)).item()), 4)
      1.1
    """
    check_same_floats("output", output, "latents", latents)
    each = _per_element(at)
    clean, noise = PREDICTIONS[schedule.prediction_type](latents, output, each.signal, each.noise)
    if isinstance(schedule, NoiseSchedule):
        clean = _clipped(clean, schedule)
    if use_clipped_model_output:
        noise = (latents - each.signal * clean) / each.noise
    return each.next_signal * clean + each.direction * noise


def ddim_step(
    latents: Float[Array, "B Y X C"],
    output: Float[Array, "B Y X C"],
    noise: Float[Array, "B Y X C"],
    at: DenoisingSteps,
    *,
    schedule: Schedule,
    use_clipped_model_output: bool = False,
) -> DDIMStep:
    """Samples a denoising step, x_p = μ + σ_t·z, with its log-density.

    Args:
      latents: x_t.
      output: Of the network, guidance included.
      noise: z, standard normal.
      at: Each row's step.
      schedule: See `ddim_mean`.
      use_clipped_model_output: See `ddim_mean`.
    Returns:
      x_p and its log-density; see `DDIMStep`.
    Reference: Song et al. 2021, arXiv:2010.02502, eq. 12.
    Example:
      >>> at = DenoisingSteps(*(jnp.array([x]) for x in (601, 0.6, 0.8, 0.8, 0.6, 0.5)))
      >>> ones = jnp.ones((1, 1, 1, 1))
      >>> step = ddim_step(ones, 0.5 * ones, ones, at, schedule=NoiseSchedule(clip_sample=False))
      >>> round(float(step.next_latents.item()), 4), round(float(step.logprobs[0]), 4)  # 1.1 + 0.5, one σ away
      (1.6, -0.7258)
    """
    check_same_floats("noise", noise, "latents", latents)
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

    Args:
      next_latents: x_p.
      mean: μ, from `ddim_mean`.
      at: Each row's step.
    Returns:
      Nats an element, one a row: the mean over elements, not their sum.
    Reference: Black et al. 2023, arXiv:2305.13301, section 4.3.
    Example:
      >>> at = DenoisingSteps(*(jnp.array([x]) for x in (601, 0.6, 0.8, 0.8, 0.6, 1.0)))
      >>> round(float(ddim_logprob(jnp.ones((1, 1, 1, 1)), jnp.ones((1, 1, 1, 1)), at)[0]), 4)  # −½ ln 2π
      -0.9189
    """
    check_same_floats("next_latents", next_latents, "mean", mean)
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
    Returns:
      In [−1, 1].
    Reference: Saharia et al. 2022 (Imagen), arXiv:2205.11487, section 2.3.
    Example:
      >>> dynamic_threshold(jnp.array([[[[2.0, -4.0]]]]), quantile=1.0, largest=8.0).tolist()  # s = 4
      [[[[0.5, -1.0]]]]
    """
    sizes = jnp.abs(clean).reshape(clean.shape[0], -1)
    threshold = jnp.clip(jnp.quantile(sizes, quantile, axis=1), 1.0, largest)[:, None, None, None]
    return jnp.clip(clean, -threshold, threshold) / threshold


def _clipped(clean: Float[Array, "B Y X C"], schedule: NoiseSchedule) -> Float[Array, "B Y X C"]:
    """Predicted clean latents, clipped as the schedule says."""
    if schedule.thresholding:
        return dynamic_threshold(
            clean, quantile=schedule.dynamic_thresholding_ratio, largest=schedule.sample_max_value
        )
    if schedule.clip_sample:
        return jnp.clip(clean, -schedule.clip_sample_range, schedule.clip_sample_range)
    return clean


def _per_element(at: DenoisingSteps) -> DenoisingSteps:
    """Coefficients of rows, fit to be multiplied with latents."""
    return DenoisingSteps(*(x[:, None, None, None] for x in at))
