# SPDX-License-Identifier: Apache-2.0
"""A denoiser of a few hundred weights, with the parts that round: convolutions, attention over a prompt, time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.ops.noise_schedule import NoiseSchedule
from jrl.typing import DenoiserFns

VOCABULARY = 11
PROMPT = 3
WIDTH = 8
LATENT = (4, 4, 4)
"""Height, width and channels of the toy's latents."""
SD_SCHEDULE = NoiseSchedule(
    beta_start=0.00085,
    beta_end=0.012,
    beta_schedule="scaled_linear",
    clip_sample=False,
    steps_offset=1,
)
"""That of Stable Diffusion 1.5."""


def toy_params(seed: int = 0, *, channels: int = LATENT[-1]) -> dict[str, Any]:
    """What trains: enough signal for outputs of ordinary size."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, fan_in: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(fan_in), jnp.float32)

    return {
        "conv_in": {"kernel": normal(3, 3, channels, WIDTH, fan_in=9 * channels)},
        "time": {"kernel": normal(WIDTH, WIDTH, fan_in=WIDTH), "bias": normal(WIDTH, fan_in=4)},
        "query": {"kernel": normal(WIDTH, WIDTH, fan_in=2)},
        "key": {"kernel": normal(WIDTH, WIDTH, fan_in=2)},
        "value": {"kernel": normal(WIDTH, WIDTH, fan_in=2)},
        "conv_out": {"kernel": normal(3, 3, WIDTH, channels, fan_in=9 * WIDTH)},
    }


def toy_frozen(seed: int = 1) -> dict[str, Any]:
    """The prompts' embedding, and the weights of the reference: those of `toy_params(0)`."""
    table = np.random.default_rng(seed).normal(size=(VOCABULARY, WIDTH))
    return {"embedding": jnp.asarray(table, jnp.float32), "reference": toy_params()}


def toy_denoiser(dtype: Any = jnp.float32) -> DenoiserFns:
    """The toy: text to context by a table, latents to images by the first three channels, twice as large.

    Args:
      dtype: In which the network computes.
    """

    def predict(params: Any, frozen: Any, latents: Any, timesteps: Any, context: Any) -> jax.Array:
        del frozen
        params = jax.tree.map(lambda x: x.astype(dtype), params)
        angles = timesteps[:, None] * jnp.exp(
            -jnp.log(1000.0) * jnp.arange(WIDTH // 2)[None, :] / (WIDTH // 2)
        )
        time = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=1).astype(dtype)
        time = time @ params["time"]["kernel"] + params["time"]["bias"][None, :]
        x = _conv(latents.astype(dtype), params["conv_in"]["kernel"]) + time[:, None, None, :]
        flat = x.reshape(x.shape[0], -1, WIDTH)
        context = context.astype(dtype)
        scores = jnp.einsum(
            "blw,bqw->blq", flat @ params["query"]["kernel"], context @ params["key"]["kernel"]
        )
        weights = jax.nn.softmax(scores.astype(jnp.float32) / np.sqrt(WIDTH)).astype(dtype)
        flat = flat + jnp.einsum("blq,bqw->blw", weights, context @ params["value"]["kernel"])
        return _conv(jax.nn.silu(flat).reshape(x.shape), params["conv_out"]["kernel"]).astype(jnp.float32)

    def decode(frozen: Any, latents: Any) -> jax.Array:
        del frozen
        images = jnp.clip(latents[..., :3] / 2 + 0.5, 0.0, 1.0)
        return images.repeat(2, axis=1).repeat(2, axis=2)

    return DenoiserFns(
        encode=lambda frozen, tokens: jnp.take(frozen["embedding"], tokens, axis=0),
        predict=predict,
        reference=lambda frozen, latents, timesteps, context: predict(
            frozen["reference"], frozen, latents, timesteps, context
        ),
        decode=decode,
    )


def toy_prompts(num_rows: int, seed: int = 0) -> jax.Array:
    """Token ids, (B Q)."""
    tokens = np.random.default_rng(seed).integers(1, VOCABULARY, size=(num_rows, PROMPT))
    return jnp.asarray(tokens, jnp.int32)


def toy_negative(frozen: Any) -> jax.Array:
    """Context of the empty prompt, (1 Q D)."""
    return jnp.take(frozen["embedding"], jnp.zeros((1, PROMPT), jnp.int32), axis=0)


def row_keys(num_rows: int, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """Keys of the first noise and of the steps, one a row."""
    keys = jax.vmap(lambda row: jax.random.split(jax.random.fold_in(jax.random.key(seed), row)))(
        jnp.arange(num_rows)
    )
    return keys[:, 0], keys[:, 1]


def _conv(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
