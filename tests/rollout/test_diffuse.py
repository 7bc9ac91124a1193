# SPDX-License-Identifier: Apache-2.0
"""The denoising loop: its log-probabilities are the learner's, its rows are independent, its noise is given by keys."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.learners.ddpo_config import DDPOConfig
from jrl.learners.ddpo_objective import recompute_logprobs
from jrl.ops.noise_schedule import denoising_steps
from jrl.rollout.diffuse import decode_in_chunks, make_diffuse
from jrl.typing import DDPOBatch, Trajectories
from tests.diffusion_toy import (
    LATENT,
    SD_SCHEDULE,
    row_keys,
    toy_denoiser,
    toy_frozen,
    toy_negative,
    toy_params,
    toy_prompts,
)

ROWS, STEPS = 4, 4


@functools.cache
def diffuse(eta: float = 1.0, guidance_scale: float = 5.0, num_steps: int = STEPS) -> Any:
    return jax.jit(
        make_diffuse(
            toy_denoiser(),
            SD_SCHEDULE,
            num_steps=num_steps,
            eta=eta,
            guidance_scale=guidance_scale,
            guidance_rescale=0.0,
            latent_shape=LATENT,
        )
    )


def sample(program: Any, rows: list[int] | None = None, seed: int = 0) -> tuple[Trajectories, jax.Array]:
    """Samples of these rows of a fixed set."""
    frozen = toy_frozen()
    taken = jnp.arange(ROWS) if rows is None else jnp.asarray(rows)
    initial, step = row_keys(ROWS, seed)
    return program(
        toy_params(3), frozen, toy_prompts(ROWS)[taken], toy_negative(frozen), initial[taken], step[taken]
    )


@functools.cache
def sampled() -> tuple[Trajectories, jax.Array]:
    return sample(diffuse())


def deviations(trajectories: Trajectories, minibatch_size: int, **changes: Any) -> np.ndarray:
    """|Δ log p| of every step under the learner, (B T), with some settings changed."""
    frozen = toy_frozen()
    config = DDPOConfig(
        sample_num_steps=trajectories.logprobs.shape[1],
        **{"sample_guidance_scale": 5.0, **{k: v for k, v in changes.items() if k != "eta"}},
    )
    steps = denoising_steps(SD_SCHEDULE, config.sample_num_steps, changes.get("eta", 1.0))

    @jax.jit
    def again(params: Any, batch: DDPOBatch) -> DDPOBatch:
        return recompute_logprobs(
            toy_denoiser(),
            params,
            frozen,
            batch,
            steps=steps,
            schedule=SD_SCHEDULE,
            config=config,
            minibatch_size=minibatch_size,
        )

    batch = DDPOBatch(trajectories, toy_negative(frozen), jnp.zeros(ROWS))
    return np.abs(again(toy_params(3), batch).trajectories.logprobs - trajectories.logprobs)


class TestLogprobs:
    def test_lore_8_8_the_learner_finds_the_samplers_log_probabilities(self) -> None:
        trajectories, images = sampled()
        assert trajectories.latents.shape == (ROWS, STEPS + 1, *LATENT) and images.shape == (ROWS, 8, 8, 3)
        assert np.all(trajectories.logprobs != 0)
        found = deviations(trajectories, ROWS)
        assert found.shape == (ROWS, STEPS) and found.max() <= 1e-6, found

    @pytest.mark.slow
    @pytest.mark.parametrize("guidance_scale", [1.0, 5.0])
    def test_in_every_column_and_shape(self, guidance_scale: float) -> None:
        trajectories, _ = sample(diffuse(1.0, guidance_scale, 20))
        assert deviations(trajectories, ROWS, sample_guidance_scale=guidance_scale).max() <= 1e-6
        assert deviations(trajectories, 1, sample_guidance_scale=guidance_scale).max() <= 5e-6

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "change", [{"sample_guidance_scale": 4.9}, {"eta": 0.99}, {"guidance_rescale": 0.1}]
    )
    def test_lore_8_8_any_other_setting_is_seen(self, change: dict[str, float]) -> None:
        assert deviations(sampled()[0], ROWS, **change).max() > 1e-4


class TestRows:
    def test_lore_9_1_a_sample_depends_on_its_own_keys_alone(self) -> None:
        order = [2, 0, 3, 1]
        trajectories, images = sampled()
        moved, moved_images = sample(diffuse(), order)
        np.testing.assert_allclose(moved.latents, trajectories.latents[jnp.asarray(order)], atol=2e-5)
        np.testing.assert_allclose(moved_images, images[jnp.asarray(order)], atol=1e-5)
        assert np.all(np.std(trajectories.latents[:, 0], axis=0) > 0)

    def test_every_step_draws_noise_of_its_own(self) -> None:
        """And rows with the same first key start alike, whatever their steps draw."""
        frozen = toy_frozen()
        initial, step = row_keys(ROWS)
        alike, _ = diffuse()(
            toy_params(3),
            frozen,
            toy_prompts(ROWS),
            toy_negative(frozen),
            jnp.stack([initial[0]] * ROWS),
            step,
        )
        states = np.asarray(alike.latents)
        assert np.all(states[:, 0] == states[:1, 0]) and np.all(np.std(states[:, 1], axis=0) > 0)

    @pytest.mark.slow
    def test_without_noise_only_the_first_key_counts(self) -> None:
        trajectories, images = sample(diffuse(0.0))
        frozen = toy_frozen()
        _, others = row_keys(ROWS, seed=9)
        again, again_images = diffuse(0.0)(
            toy_params(3), frozen, toy_prompts(ROWS), toy_negative(frozen), row_keys(ROWS)[0], others
        )
        np.testing.assert_array_equal(again.latents, trajectories.latents)
        np.testing.assert_array_equal(again_images, images)
        assert not trajectories.logprobs.any()


@pytest.mark.parametrize("num_rows", [1, 7])
def test_images_decoded_in_chunks_keep_their_order(num_rows: int) -> None:
    latents = jnp.arange(num_rows * 12, dtype=jnp.float32).reshape(num_rows, 2, 2, 3)
    sizes = []

    def decode(part: jax.Array) -> jax.Array:
        sizes.append(part.shape[0])
        return part.repeat(2, axis=1) + 1.0

    images = decode_in_chunks(decode, latents, decode_rows=3)
    np.testing.assert_array_equal(images, latents.repeat(2, axis=1) + 1.0)
    assert max(sizes) <= 3
