# SPDX-License-Identifier: Apache-2.0
"""Teaches the toy model to denoise pictures of shapes: the mean squared error of the clean picture that it predicts.

Reference: Ho et al. 2020, arXiv:2006.11239; flows: Liu et al. 2022, arXiv:2209.03003;
unconditional rows for guidance: Ho & Salimans 2022, arXiv:2207.12598.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jrl.models.diffusion import DiffusionModel
from jrl.ops import FlowSchedule

from .networks import PixelShuffle
from .pictures import PROMPTS, draw

_EMPTY_SHARE = 0.1
"""Rows whose prompt is left out, so that there is something to guide away from."""


@dataclass(frozen=True)
class Pretraining:
    """How the toy model learns to denoise.

    Attributes:
      steps: Optimizer steps.
      batch_size: Pictures of a step.
      learning_rate: Of Adam, at its highest: a warm-up over 1/16 of the steps, then a cosine down to nearly 0.
      seed: Of weights, pictures and noise.
    """

    steps: int = 600
    batch_size: int = 64
    learning_rate: float = 2e-3
    seed: int = 0


def pretrain(
    model: DiffusionModel, options: Pretraining, *, report: Callable[[int, float], None]
) -> DiffusionModel:
    """The same model with a denoiser and a table of words that have seen pictures.

    Args:
      model: A toy; its decoder must be a `PixelShuffle`.
      options: How long and how fast.
      report: Is told the step and the mean loss since the last time, eight times in all.
    """
    shuffle = model.vae
    assert isinstance(shuffle, PixelShuffle) and model.schedule.prediction_type == "sample"
    size = model.sample_size[0] * shuffle.factor
    schedule = optax.warmup_cosine_decay_schedule(
        0.0,
        options.learning_rate,
        max(options.steps // 16, 1),
        options.steps,
        options.learning_rate / 50,
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))
    times, shares = _forward_process(model)

    @jax.jit
    def step(params: Any, moments: Any, latents: Any, tokens: Any, key: Any) -> Any:
        time_key, noise_key = jax.random.split(key)
        number = jax.random.randint(time_key, latents.shape[:1], 0, len(times))
        noise, timesteps = jax.random.normal(noise_key, latents.shape), times[number]
        signal, level = shares[:, number].reshape(2, -1, 1, 1, 1)
        noisy = signal * latents + level * noise

        def loss(params: Any) -> Any:
            context = model.text_encoder.encode(params["text_encoder"], tokens, dtype=jnp.float32)
            found = model.unet.apply(
                params["unet"], None, noisy, timesteps, context, dtype=jnp.float32, remat=False
            )
            return jnp.mean(jnp.square(found - latents))

        value, gradient = jax.value_and_grad(loss)(params)
        updates, moments = optimizer.update(gradient, moments, params)
        return optax.apply_updates(params, updates), moments, value

    params = {name: jax.tree.map(jnp.asarray, model.weights[name]) for name in ("unet", "text_encoder")}
    moments, losses = jax.jit(optimizer.init)(params), []
    rng, root = np.random.default_rng(options.seed), jax.random.key(options.seed)
    for number in range(options.steps):
        indices = rng.integers(len(PROMPTS), size=options.batch_size)
        empty = rng.random(options.batch_size) < _EMPTY_SHARE
        tokens = model.tokenizer(
            ["" if gone else PROMPTS[index] for index, gone in zip(indices, empty, strict=True)]
        )
        latents = shuffle.encode(draw(indices, size=size, rng=rng))
        params, moments, value = step(params, moments, latents, tokens, jax.random.fold_in(root, number))
        losses.append(value)
        if (number + 1) % max(options.steps // 8, 1) == 0:
            report(number + 1, float(np.mean(jax.device_get(losses))))
            losses.clear()
    return replace(model, weights={**model.weights, **jax.device_get(params)})


def _forward_process(model: DiffusionModel) -> tuple[jax.Array, jax.Array]:
    """(timesteps, shares of picture and of noise at each of them) of training."""
    schedule = model.schedule
    count = schedule.num_train_timesteps
    if isinstance(schedule, FlowSchedule):
        sigmas = np.arange(1, count + 1) / count
        times, shares = sigmas * count, np.stack([1.0 - sigmas, sigmas])
    else:
        levels = schedule.alphas_cumprod
        times, shares = np.arange(count), np.sqrt(np.stack([levels, 1.0 - levels]))
    return jnp.asarray(times, jnp.float32), jnp.asarray(shares, jnp.float32)
