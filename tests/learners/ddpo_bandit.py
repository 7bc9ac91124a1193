# SPDX-License-Identifier: Apache-2.0
"""A policy without a network: what it predicts is one trained array, the same at every step and for every state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.learners.ddpo_config import DDPOConfig
from jrl.ops.noise_schedule import denoising_steps
from jrl.rollout.diffuse import make_diffuse
from jrl.typing import DDPOBatch, DenoiserFns
from tests.diffusion_toy import SD_SCHEDULE, row_keys

STEPS = 3
SHAPE = (4, 4, 1)
SIZE = 16
"""Elements of the latents."""
FROZEN = {"strength": jnp.array([[[0.5]]]), "reference": jnp.zeros(SHAPE)}
"""What the negative prompt multiplies the array by (a prompt's factor is its token), and the untrained array."""


def bandit(dtype: Any = jnp.float32) -> DenoiserFns:
    """Output = θ · the prompt's factor."""

    def predict(params: Any, frozen: Any, latents: Any, timesteps: Any, context: Any) -> jax.Array:
        del frozen, latents, timesteps
        theta = params["theta"].astype(dtype)
        return (theta[None] * context.astype(dtype)[:, :, :, None]).astype(jnp.float32)

    return DenoiserFns(
        encode=lambda frozen, tokens: tokens[:, :, None].astype(jnp.float32),
        predict=predict,
        reference=lambda frozen, latents, timesteps, context: predict(
            {"theta": frozen["reference"]}, frozen, latents, timesteps, context
        ),
        decode=lambda frozen, latents: jnp.repeat(latents, 3, axis=-1),
    )


def bandit_config(**options: Any) -> DDPOConfig:
    """Without guidance, in three steps, and with hardly any clipping."""
    return DDPOConfig(
        **{"sample_num_steps": STEPS, "sample_guidance_scale": 1.0, "train_clip_range": 0.5, **options}
    )


def theta(seed: int = 0) -> dict[str, jax.Array]:
    """Parameters away from the reference."""
    return {"theta": jnp.asarray(np.random.default_rng(seed).normal(size=SHAPE) * 0.3, jnp.float32)}


def sampler(config: DDPOConfig) -> Any:
    """The jitted sampler of a configuration."""
    return jax.jit(
        make_diffuse(
            bandit(),
            SD_SCHEDULE,
            num_steps=config.sample_num_steps,
            eta=config.sample_eta,
            guidance_scale=config.sample_guidance_scale,
            guidance_rescale=config.guidance_rescale,
            latent_shape=SHAPE,
        )
    )


def sampled(params: Any, num_rows: int, seed: int = 0, *, diffuse: Any) -> DDPOBatch:
    """Trajectories of the parameters, with random advantages."""
    trajectories, _ = diffuse(
        params, FROZEN, jnp.ones((num_rows, 1), jnp.int32), FROZEN["strength"], *row_keys(num_rows, seed)
    )
    advantages = np.random.default_rng(seed).normal(size=num_rows)
    return DDPOBatch(trajectories, FROZEN["strength"], jnp.asarray(advantages, jnp.float32))


def slopes_and_noise(params: Any, batch: DDPOBatch) -> tuple[np.ndarray, np.ndarray]:
    """∂μ/∂θ over σ of each step, and the noise z of every step of every sample, (B T Y X C)."""
    steps = denoising_steps(SD_SCHEDULE, STEPS, 1.0, dtype=np.float64)
    states = np.asarray(batch.trajectories.latents, np.float64)
    signal, noise, after, direction, std = (x[None, :, None, None, None] for x in steps[1:])
    output = np.asarray(params["theta"], np.float64)[None, None]
    mean = after * (states[:, :-1] - noise * output) / signal + direction * output
    slope = steps.direction - steps.next_signal * steps.noise / steps.signal
    return slope / steps.std, (states[:, 1:] - mean) / std
