# SPDX-License-Identifier: Apache-2.0
"""Gradients of a reward through the last steps: those of the sampler itself, cut where they should be."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.learners.reward_gradient import reward_gradient_loss
from jrl.ops.ddim import ddim_mean, steps_of_rows
from jrl.ops.flow_schedule import FlowSchedule
from jrl.ops.metrics import finalize
from jrl.rollout.diffuse import denoise
from tests.diffusion_toy import LATENT, toy_denoiser, toy_frozen, toy_negative, toy_params, toy_prompts

ROWS, STEPS, ETA, SCALE = 3, 4, 0.5, 1.5
FLOW = FlowSchedule(spacing="uniform")
MODEL, FROZEN, PARAMS = toy_denoiser(), toy_frozen(), toy_params(3)
NOISE = jax.random.normal(jax.random.key(1), (STEPS, ROWS, *LATENT))
START = jax.random.normal(jax.random.key(0), (ROWS, *LATENT))


def reward(images: jax.Array) -> jax.Array:
    """A smooth one that depends on all pixels."""
    return jnp.mean(jnp.square(images) * images.shape[1], axis=(1, 2, 3))


def sample(params: Any) -> Any:
    """Trajectories from fixed noise; differentiable from end to end."""
    context = MODEL.encode(FROZEN, toy_prompts(ROWS))
    return denoise(
        MODEL,
        params,
        FROZEN,
        context,
        toy_negative(FROZEN),
        START,
        lambda number: NOISE[number],
        steps=FLOW.steps(STEPS, ETA),
        schedule=FLOW,
        guidance_scale=SCALE,
        guidance_rescale=0.0,
    )


@cache
def sampled() -> Any:
    return jax.jit(sample)(PARAMS)


def loss(params: Any, num_last_steps: int) -> Any:
    return reward_gradient_loss(
        MODEL,
        params,
        FROZEN,
        sampled(),
        toy_negative(FROZEN),
        reward,
        schedule=FLOW,
        eta=ETA,
        num_last_steps=num_last_steps,
        guidance_scale=SCALE,
    )


def gradient(num_last_steps: int) -> Any:
    sampled()  # outside of the trace
    return jax.jit(jax.grad(lambda params: loss(params, num_last_steps)[0]))(PARAMS)


def assert_close(found: Any, wanted: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * float(jnp.abs(other).max()) + 1e-7)


def test_through_all_steps_it_is_the_samplers_own_gradient() -> None:
    def whole(params: Any) -> Any:
        return -reward(MODEL.decode(FROZEN, sample(params).latents[:, -1])).sum()

    assert_close(gradient(STEPS), jax.jit(jax.grad(whole))(PARAMS))


def test_through_one_step_it_is_the_rewards_slope_times_that_of_the_mean() -> None:
    found = sampled()
    at = steps_of_rows(FLOW.steps(STEPS, ETA), jnp.full((ROWS,), STEPS - 1))

    def mean(params: Any) -> Any:
        outputs = (
            MODEL.predict(params, FROZEN, found.latents[:, -2], at.timesteps, context)
            for context in (jnp.repeat(toy_negative(FROZEN), ROWS, axis=0), found.context)
        )
        away, towards = outputs
        return ddim_mean(found.latents[:, -2], away + SCALE * (towards - away), at, schedule=FLOW)

    slope = jax.grad(lambda x: -reward(MODEL.decode(FROZEN, x)).sum())(found.latents[:, -1])
    wanted = jax.jit(lambda params: jax.vjp(mean, params)[1](slope)[0])(PARAMS)
    assert_close(gradient(1), wanted)
    for last, other in zip(jax.tree.leaves(wanted), jax.tree.leaves(gradient(STEPS)), strict=True):
        assert float(jnp.abs(last - other).max()) > 1e-3 * float(jnp.abs(other).max())


def test_the_images_are_the_sampled_ones() -> None:
    total, weight, metrics = loss(PARAMS, 2)
    wanted = reward(MODEL.decode(FROZEN, sampled().latents[:, -1]))
    np.testing.assert_allclose(total, -wanted.sum(), rtol=1e-6)
    assert float(weight) == ROWS
    assert finalize(metrics)["reward/mean"] == pytest.approx(float(wanted.mean()), rel=1e-6)


@pytest.mark.parametrize("count", [0, STEPS + 1])
def test_steps_that_were_not_sampled_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match=r"`num_last_steps` must be in 1\.\.4"):
        loss(PARAMS, count)
