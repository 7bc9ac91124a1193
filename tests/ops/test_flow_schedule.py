# SPDX-License-Identifier: Apache-2.0
"""The steps of a flow's SDE: the published formula, its density, and the marginals that it keeps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

from jrl.ops.ddim import ddim_logprob, ddim_mean, ddim_step, steps_of_rows
from jrl.ops.flow_schedule import FlowSchedule, flow_steps, make_flow_schedule
from jrl.ops.noise_schedule import NoiseSchedule

UNIFORM = FlowSchedule(spacing="uniform")
SD3 = FlowSchedule(shift=3.0)
TARGET_MEAN, TARGET_STD = 1.5, 0.4


def draws(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def published(schedule: FlowSchedule, num_steps: int, level: float, x: Any, v: Any) -> tuple[Any, Any]:
    """(mean, deviation) of each step as Flow-GRPO writes them, in float64; one row a step."""
    sigmas = schedule.sigmas(num_steps)
    now, after = sigmas[:-1], sigmas[1:]
    dt = (after - now)[:, None, None, None]
    rate = level * np.sqrt(now / (1 - np.where(now == 1, sigmas[1], now)))
    sigma, std = now[:, None, None, None], rate[:, None, None, None]
    mean = x * (1 + std**2 / (2 * sigma) * dt) + v * (1 + std**2 * (1 - sigma) / (2 * sigma)) * dt
    return mean, rate * np.sqrt(now - after)


class TestSteps:
    @pytest.mark.parametrize("schedule", [UNIFORM, SD3], ids=["uniform", "shifted"])
    @pytest.mark.parametrize("level", [0.3, 0.7, 1.0])
    def test_lore_8_8_they_are_the_published_ones(self, schedule: FlowSchedule, level: float) -> None:
        x, v, z = (draws(seed, 6, 2, 2, 3) for seed in range(3))
        at = steps_of_rows(schedule.steps(6, level), jnp.arange(6))
        mean, std = published(schedule, 6, level, np.asarray(x, np.float64), np.asarray(v, np.float64))
        np.testing.assert_allclose(ddim_mean(x, v, at, schedule=schedule), mean, rtol=1e-5, atol=1e-6)
        taken = ddim_step(x, v, z, at, schedule=schedule)
        wanted = mean + std[:, None, None, None] * np.asarray(z)
        np.testing.assert_allclose(taken.next_latents, wanted, rtol=1e-5, atol=1e-6)
        density = norm.logpdf(taken.next_latents, mean, std[:, None, None, None]).mean(axis=(1, 2, 3))
        np.testing.assert_allclose(taken.logprobs, density, rtol=1e-4, atol=1e-5)

    def test_golden(self) -> None:
        # σ = ½, σ' = ¼, a = ½: s² = ¼, Δ = ¼. μ = x·(1 − ¼·¼) − v·(1 + ¼·½)·¼; s·√Δ = ¼.
        steps = flow_steps(UNIFORM, 4, 0.5)
        at = steps_of_rows(steps, jnp.array([2]))
        mean = ddim_mean(jnp.full((1, 1, 1, 1), 2.0), jnp.ones((1, 1, 1, 1)), at, schedule=UNIFORM)
        assert mean.item() == pytest.approx(2 * (1 - 1 / 16) - 9 / 32, abs=1e-6)
        assert steps.std[2] == 0.25 and steps.timesteps[2] == 500.0
        # In DDIM's terms: the share of noise after the step is ¼ − ¼·¼/(2·½).
        assert steps.direction[2] == 0.1875 and steps.next_signal[2] == 0.75

    def test_a_network_of_clean_latents_takes_the_same_steps(self) -> None:
        x, v = draws(0, 5, 2, 2, 1), draws(1, 5, 2, 2, 1)
        at = steps_of_rows(SD3.steps(5, 0.7), jnp.arange(5))
        clean = x - at.noise[:, None, None, None] * v
        found = ddim_mean(x, clean, at, schedule=FlowSchedule(shift=3.0, prediction_type="sample"))
        np.testing.assert_allclose(found, ddim_mean(x, v, at, schedule=SD3), atol=1e-5)

    def test_without_noise_they_are_eulers(self) -> None:
        x, v = draws(0, 5, 2, 2, 1), draws(1, 5, 2, 2, 1)
        steps = SD3.steps(5, 0.0)
        sigmas = SD3.sigmas(5)
        taken = ddim_step(x, v, draws(2, 5, 2, 2, 1), steps_of_rows(steps, jnp.arange(5)), schedule=SD3)
        wanted = np.asarray(x) + np.diff(sigmas)[:, None, None, None] * np.asarray(v)
        np.testing.assert_allclose(taken.next_latents, wanted, atol=1e-6)
        np.testing.assert_array_equal(taken.logprobs, np.zeros(5))

    def test_the_density_integrates_to_one(self) -> None:
        # One element a row, 20,001 points of its axis as rows.
        points = jnp.linspace(-6.0, 6.0, 20001)[:, None, None, None]
        for step in range(4):
            at = steps_of_rows(UNIFORM.steps(4, 0.7), jnp.full(20001, step))
            mean = ddim_mean(jnp.full_like(points, 0.5), jnp.full_like(points, -0.3), at, schedule=UNIFORM)
            density = np.exp(np.asarray(ddim_logprob(points, mean, at), np.float64))
            assert np.trapezoid(density, dx=12 / 20000) == pytest.approx(1.0, abs=1e-4)

    @pytest.mark.parametrize("level", [-0.1, 1.5])
    def test_a_level_out_of_range_is_named(self, level: float) -> None:
        with pytest.raises(ValueError, match=r"`eta`, the noise level, must be in \[0, 1\]"):
            UNIFORM.steps(4, level)


def velocity(x: jax.Array, sigma: jax.Array) -> jax.Array:
    """Exact velocity where clean latents are N(m, s²): E[ε − x0 | x]."""
    sigma = sigma[:, None, None, None]
    variance = (1 - sigma) ** 2 * TARGET_STD**2 + sigma**2
    apart = (x - (1 - sigma) * TARGET_MEAN) / variance
    return sigma * apart - TARGET_MEAN - (1 - sigma) * TARGET_STD**2 * apart


def end_of(num_steps: int, level: float) -> tuple[float, float]:
    """Exact mean and variance of the last latents: each step is linear in x, so two points tell it."""
    steps = UNIFORM.steps(num_steps, level)
    at = steps_of_rows(steps, jnp.arange(num_steps))

    def means(x: float) -> np.ndarray:
        rows = jnp.full((num_steps, 1, 1, 1), x)
        return np.asarray(ddim_mean(rows, velocity(rows, at.noise), at, schedule=UNIFORM), np.float64).ravel()

    offset = means(0.0)
    slope = means(1.0) - offset
    mean, variance = 0.0, 1.0
    for a, b, std in zip(slope, offset, np.asarray(steps.std, np.float64), strict=True):
        mean, variance = a * mean + b, a * a * variance + std * std
    return mean, variance


class TestMarginals:
    @pytest.mark.parametrize("level", [0.0, 0.3, 0.7, 1.0])
    def test_samples_have_the_flows_mean_and_variance_at_every_noise_level(self, level: float) -> None:
        wanted = np.array([TARGET_MEAN, TARGET_STD**2])
        for count in (100, 1000):  # of first order in the length of a step
            assert (np.abs(end_of(count, level) - wanted) < 0.55 / count).all()

    def test_noise_without_the_drift_that_belongs_to_it_is_seen(self) -> None:
        # Euler's mean with the SDE's noise: what the correction of the drift is for.
        steps, euler = UNIFORM.steps(800, 0.7), UNIFORM.steps(800, 0.0)
        at = steps_of_rows(euler._replace(std=steps.std), jnp.arange(800))
        rows = jnp.zeros((800, 1, 1, 1))
        low, high = (
            np.asarray(ddim_mean(x, velocity(x, at.noise), at, schedule=UNIFORM)).ravel()
            for x in (rows, rows + 1)
        )
        variance = 1.0
        for a, std in zip(high - low, np.asarray(steps.std), strict=True):
            variance = a * a * variance + std * std
        assert variance > TARGET_STD**2 + 0.05


class TestSchedule:
    def test_the_shift_depends_on_the_size_alone_where_it_is_dynamic(self) -> None:
        dynamic = FlowSchedule(use_dynamic_shifting=True)
        assert SD3.at_resolution(1024) is SD3
        assert dynamic.at_resolution(256).resolution_shift == pytest.approx(0.5)
        assert dynamic.at_resolution(4096).resolution_shift == pytest.approx(1.15)
        with pytest.raises(ValueError, match=r"at_resolution"):
            dynamic.sigmas(4)

    def test_steps_with_densities_are_finite_and_noisy_at_both_ends(self) -> None:
        for schedule in (UNIFORM, SD3, FlowSchedule(use_dynamic_shifting=True).at_resolution(1024)):
            steps = schedule.steps(10, 0.7)
            assert all(np.isfinite(x).all() for x in steps)
            assert (steps.std > 0).all() and steps.next_signal[-1] == 1.0

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"shift": 0.0}, "`shift` must be positive"),
            ({"time_shift_type": "cubic"}, "`time_shift_type` must be one of"),
            ({"shift_terminal": 1.0}, "`shift_terminal` must be in"),
            ({"max_image_seq_len": 256}, "`max_image_seq_len` must be above"),
            ({"spacing": "leading"}, "`spacing` must be one of"),
            ({"prediction_type": "epsilon"}, "`prediction_type` must be one of"),
            ({"num_train_timesteps": 0}, "`num_train_timesteps` must be at least 1"),
        ],
    )
    def test_what_has_no_meaning_is_refused(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            FlowSchedule(**changes)

    def test_a_flow_is_no_prediction_of_a_noise_schedule(self) -> None:
        with pytest.raises(ValueError, match="`prediction_type` must be one of"):
            NoiseSchedule(prediction_type="flow_prediction")


class TestRead:
    def test_keys_are_fields_or_have_one_value(self) -> None:
        config = {
            "_class_name": "FlowMatchEulerDiscreteScheduler",
            "_diffusers_version": "0.32.0",
            "shift": 3,
            "use_dynamic_shifting": False,
            "shift_terminal": None,
            "invert_sigmas": False,
            "stochastic_sampling": False,
        }
        assert make_flow_schedule(config) == SD3

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"use_karras_sigmas": True}, "`use_karras_sigmas` must be false"),
            ({"shift": "3"}, "must have float for `shift`"),
            ({"sigma_tail": 1.0}, "unknown key `sigma_tail`"),
            ({"_class_name": "FlowMatchHeunDiscreteScheduler"}, "FlowMatchEulerDiscreteScheduler, got"),
        ],
    )
    def test_anything_else_is_refused(self, config: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            make_flow_schedule(config)
