# SPDX-License-Identifier: Apache-2.0
"""The network's output under classifier-free guidance: the one way in which sampler and learner call it.

Both go through here, so that the probability ratio of a fresh sample differs from 1 by rounding alone.

Reference: Ho and Salimans 2022, arXiv:2207.12598; the rescaling: Lin et al. 2024, arXiv:2305.08891, section 3.4.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from jrl.ops.checks import check_float

Predict = Callable[[Array, Array, Array], Array]
"""`(latents, timesteps, context) -> output`: `DenoiserFns.predict` or `.reference` with its weights bound."""


def guided_output(
    predict: Predict,
    latents: Float[Array, "B Y X C"],
    timesteps: Num[Array, "B"],
    context: Float[Array, "B Q D"],
    negative: Float[Array, "1 Q D"],
    *,
    guidance_scale: float,
    guidance_rescale: float = 0.0,
) -> Float[Array, "B Y X C"]:
    """The network's output, pushed away from what it says of the negative prompt.

        out = out_neg + w·(out_pos − out_neg)
        out ← φ·out·std(out_pos)/std(out) + (1 − φ)·out

    One network call on 2 B rows. Both rows of a sample stand together, the negative one first: on a mesh a sample stays
    on the device that holds it. w <= 1 is no guidance: one call on B rows, which reads no negative prompt.

    Args:
      predict: The network.
      latents: x_t.
      timesteps: t of each row.
      context: Of the prompts.
      negative: Of the negative prompt, the same for all rows.
      guidance_scale: w; 5 to 7.5 is usual.
      guidance_rescale: φ in [0, 1], against over-exposure at large w; 0 is off. Deviations are of each row.
    Returns:
      One output a row, through both halves of which gradients flow.
    Reference: Ho and Salimans 2022, arXiv:2207.12598, eq. 6; the rescaling: Lin et al. 2024, arXiv:2305.08891,
    section 3.4.
    Example:
      >>> predict = lambda latents, timesteps, context: latents + context[..., None]
      >>> latents, prompt, negative = jnp.zeros((1, 1, 1, 1)), jnp.full((1, 1, 1), 3.0), jnp.ones((1, 1, 1))
      >>> guided_output(predict, latents, jnp.array([601]), prompt, negative, guidance_scale=5.0).tolist()
      [[[[11.0]]]]
    """
    check_float("latents", latents)
    check_float("context", context)
    check_float("negative", negative)
    if guidance_scale <= 1:
        return predict(latents, timesteps, context)
    away = jnp.broadcast_to(negative, context.shape).astype(context.dtype)
    both = predict(_twice(latents, latents), _twice(timesteps, timesteps), _twice(away, context))
    pairs = both.reshape(-1, 2, *both.shape[1:])
    negatives, positives = pairs[:, 0], pairs[:, 1]
    guided = negatives + guidance_scale * (positives - negatives)
    if not guidance_rescale:
        return guided
    rescaled = guided * (_deviation(positives) / _deviation(guided))
    return guidance_rescale * rescaled + (1 - guidance_rescale) * guided


def _twice(first: Array, second: Array) -> Array:
    """Rows of both, one of the first before each of the second."""
    return jnp.stack([first, second], axis=1).reshape(2 * first.shape[0], *first.shape[1:])


def _deviation(x: Float[Array, "B Y X C"]) -> Float[Array, "B 1 1 1"]:
    return jnp.std(x, axis=(1, 2, 3), keepdims=True)
