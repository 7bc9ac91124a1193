# SPDX-License-Identifier: Apache-2.0
"""Guidance: what one call on both prompts makes of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jrl.ops.denoising import guided_output

SHAPE = (3, 4, 4, 2)


def rows(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def predict(latents: jax.Array, timesteps: jax.Array, context: jax.Array) -> jax.Array:
    """Something of each row alone."""
    push = jnp.sum(context, axis=(1, 2)) * timesteps.astype(jnp.float32)
    return latents * push[:, None, None, None] + 0.1


LATENTS, TIMESTEPS = rows(0, *SHAPE), jnp.array([3, 2, 1], jnp.int32)
CONTEXT, NEGATIVE = rows(1, 3, 2, 5), rows(2, 1, 2, 5)
POSITIVES = predict(LATENTS, TIMESTEPS, CONTEXT)
NEGATIVES = predict(LATENTS, TIMESTEPS, jnp.repeat(NEGATIVE, 3, axis=0))


def guided(scale: float, rescale: float = 0.0) -> jax.Array:
    return guided_output(
        predict, LATENTS, TIMESTEPS, CONTEXT, NEGATIVE, guidance_scale=scale, guidance_rescale=rescale
    )


def test_it_goes_on_from_the_negative_through_the_positive() -> None:
    np.testing.assert_allclose(guided(5.0), NEGATIVES + 5.0 * (POSITIVES - NEGATIVES), rtol=1e-5)


def test_a_scale_of_at_most_one_never_reads_the_negative_prompt() -> None:
    for scale in (1.0, 0.5, 0.0):
        np.testing.assert_array_equal(guided(scale), POSITIVES)


def test_it_is_one_call_with_both_rows_of_a_sample_together() -> None:
    calls = []

    def recorded(latents: jax.Array, timesteps: jax.Array, context: jax.Array) -> jax.Array:
        calls.append((latents, timesteps, context))
        return latents

    guided_output(recorded, LATENTS, TIMESTEPS, CONTEXT, NEGATIVE, guidance_scale=2.0)
    ((latents, timesteps, context),) = calls
    np.testing.assert_array_equal(latents, jnp.repeat(LATENTS, 2, axis=0))
    assert timesteps.tolist() == [3, 3, 2, 2, 1, 1]
    np.testing.assert_array_equal(context[0::2], jnp.repeat(NEGATIVE, 3, axis=0))
    np.testing.assert_array_equal(context[1::2], CONTEXT)


def test_rescaled_wholly_it_has_the_deviation_of_the_positive_output() -> None:
    deviations = np.std(guided(7.5, 1.0), axis=(1, 2, 3))
    np.testing.assert_allclose(deviations, np.std(POSITIVES, axis=(1, 2, 3)), rtol=1e-5)
    np.testing.assert_allclose(guided(7.5, 0.3), 0.3 * guided(7.5, 1.0) + 0.7 * guided(7.5), atol=1e-4)


def test_gradients_flow_through_both_halves() -> None:
    def total(context: jax.Array, negative: jax.Array) -> jax.Array:
        out = guided_output(predict, LATENTS, TIMESTEPS, context, negative, guidance_scale=5.0)
        return jnp.sum(jnp.square(out))

    assert all(np.all(gradient != 0) for gradient in jax.jit(jax.grad(total, (0, 1)))(CONTEXT, NEGATIVE))
