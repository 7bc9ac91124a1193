# SPDX-License-Identifier: Apache-2.0
"""A step of DDIM with its log-probability: worked-out vectors, TRL's scheduler step, identities."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops.ddim import (
    ddim_logprob,
    ddim_mean,
    ddim_step,
    dynamic_threshold,
    step_of_timesteps,
    steps_of_rows,
)
from jrl.ops.noise_schedule import DenoisingSteps, NoiseSchedule, denoising_steps
from tests.diffusion_toy import SD_SCHEDULE

GOLDEN = Path(__file__).parents[1] / "golden" / "trl_ddpo_0231.npz"
FIFTY = {eta: denoising_steps(SD_SCHEDULE, 50, eta) for eta in (0.0, 0.5, 1.0)}


def at(timesteps: list[int], eta: float = 1.0) -> DenoisingSteps:
    ids = step_of_timesteps(FIFTY[eta], jnp.asarray(timesteps, jnp.int32))
    return steps_of_rows(FIFTY[eta], ids)


def four(*numbers: float) -> jax.Array:
    """One row of four elements as latents."""
    return jnp.asarray(numbers, jnp.float32).reshape(1, 2, 2, 1)


def latents(seed: int, num_rows: int = 3) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(num_rows, 4, 4, 2)), jnp.float32)


@pytest.mark.parametrize(
    ("timestep", "mean", "after", "logprob"),
    [
        (
            981,
            (0.538132, -1.076265, 2.175823, 0.093174),
            (0.992596, -1.530728, 2.403054, 0.093174),
            -0.411550,
        ),
        (501, (0.513109, -1.026219, 2.063556, 0.044475), (0.807894, -1.321003, 2.210949, 0.044475), 0.021322),
        (21, (0.491619, -0.983238, 1.979405, 0.051715), (0.531099, -1.022718, 1.999145, 0.051715), 2.031784),
        (1, (0.498142, -0.996285, 1.994641, 0.008286), (0.518791, -1.016933, 2.004965, 0.008286), 2.679933),
    ],
)
def test_lore_8_8_golden_steps(timestep: int, mean: tuple, after: tuple, logprob: float) -> None:
    x, out, z = four(0.5, -1.0, 2.0, 0.0), four(0.1, -0.2, 0.3, -0.4), four(1.0, -1.0, 0.5, 0.0)
    np.testing.assert_allclose(
        ddim_mean(x, out, at([timestep]), schedule=SD_SCHEDULE).ravel(), mean, atol=1.5e-6
    )
    taken = ddim_step(x, out, z, at([timestep]), schedule=SD_SCHEDULE)
    np.testing.assert_allclose(taken.next_latents.ravel(), after, atol=1.5e-6)
    # At σ = 0.02 half a unit in the last place of x_p is 6e-6 deviations.
    np.testing.assert_allclose(taken.logprobs, [logprob], atol=1e-5)
    # log p depends on σ alone where z is fixed.
    half = ddim_step(x, out, z, at([timestep], 0.5), schedule=SD_SCHEDULE)
    np.testing.assert_allclose(half.logprobs, [logprob + np.log(2)], atol=2e-5)


def test_ten_steps_of_a_known_loop() -> None:
    """diffusers' own figures of this loop without noise: x·t/(t + 1) for a network, β from 0.01, clipping."""
    schedule = NoiseSchedule(beta_start=0.01, beta_end=0.02)
    x = jnp.asarray(np.arange(768, dtype=np.float32).reshape(3, 8, 8, 4).transpose(3, 1, 2, 0) / 768)
    steps = denoising_steps(schedule, 10, 0.0)
    for number, timestep in enumerate(steps.timesteps.tolist()):
        rows = steps_of_rows(steps, jnp.full(4, number, jnp.int32))
        x = ddim_step(x, x * (timestep / (timestep + 1)), x, rows, schedule=schedule).next_latents
    assert float(jnp.sum(jnp.abs(x))) == pytest.approx(149.0784, abs=1e-2)
    assert float(jnp.mean(jnp.abs(x))) == pytest.approx(0.1941, abs=1e-3)


class TestIdentities:
    def test_true_noise_predicts_the_true_latents_whatever_the_network_says(self) -> None:
        clean, noise = latents(0), latents(1)
        steps = at([981, 501, 21], 0.0)
        wide = DenoisingSteps(*(x[:, None, None, None] for x in steps))
        now = wide.signal * clean + wide.noise * noise
        wanted = wide.next_signal * clean + wide.direction * noise
        outputs = {
            "epsilon": noise,
            "sample": clean,
            "v_prediction": wide.signal * noise - wide.noise * clean,
        }
        for prediction, output in outputs.items():
            schedule = dataclasses.replace(SD_SCHEDULE, prediction_type=prediction)
            mean = ddim_mean(now, output, steps, schedule=schedule)
            np.testing.assert_allclose(mean, wanted, atol=2e-5)

    def test_clipping_that_clips_nothing_changes_nothing(self) -> None:
        schedule = dataclasses.replace(SD_SCHEDULE, clip_sample=True, clip_sample_range=1e6)
        arguments = latents(0), latents(1), at([981, 501, 21])
        plain = ddim_mean(*arguments, schedule=SD_SCHEDULE)
        np.testing.assert_array_equal(ddim_mean(*arguments, schedule=schedule), plain)
        again = ddim_mean(*arguments, schedule=schedule, use_clipped_model_output=True)
        np.testing.assert_allclose(again, plain, atol=1e-5)

    def test_a_threshold_is_of_each_row_and_at_least_one(self) -> None:
        small, large = 0.1 * latents(0, 1), 10.0 * latents(1, 1)
        both = dynamic_threshold(jnp.concatenate([small, large]), quantile=0.9, largest=4.0)
        np.testing.assert_array_equal(both[:1], small)
        np.testing.assert_allclose(both[1:], jnp.clip(large, -4.0, 4.0) / 4.0, rtol=1e-6)

    def test_no_gradient_flows_into_the_action_or_at_eta_zero(self) -> None:
        x, mean = latents(0), latents(1)
        action = jax.grad(lambda x: jnp.sum(ddim_logprob(x, mean, at([981, 501, 21]))))(x)
        assert not action.any()
        silent = at([981, 501, 21], 0.0)
        assert not ddim_logprob(x, mean, silent).any()
        gradient = jax.grad(lambda m: jnp.sum(ddim_logprob(x, m, silent)))(mean)
        np.testing.assert_array_equal(gradient, jnp.zeros_like(mean))

    def test_its_gradient_is_the_noise_over_the_deviation(self) -> None:
        """∂log p/∂μ = z/(σ·D): what a network learns from a step."""
        mean, z, steps = latents(0), latents(1), at([981, 501, 21])
        std = steps.std[:, None, None, None]
        gradient = jax.grad(lambda m: jnp.sum(ddim_logprob(mean + std * z, m, steps)))(mean)
        np.testing.assert_allclose(gradient, z / std / z[0].size, atol=1e-5)

    def test_steps_are_found_by_timestep(self) -> None:
        found = step_of_timesteps(FIFTY[1.0], jnp.array([981, 1, 21], jnp.int32))
        assert found.tolist() == [0, 49, 48]

    def test_another_shape_is_named(self) -> None:
        with pytest.raises(ValueError, match=r"`output` must have shape .* like `latents`"):
            ddim_mean.__wrapped__(latents(0), latents(0, 2), at([1, 1, 1]), schedule=SD_SCHEDULE)


CLIPPING = {
    "plain": {},
    "clip": {"clip_sample": True},
    "threshold": {"thresholding": True, "dynamic_thresholding_ratio": 0.9, "sample_max_value": 1.5},
}


@pytest.mark.parametrize(
    ("prediction", "eta", "clipping"),
    [
        pytest.param(*case, marks=[] if case[1:] == (1.0, "plain") else pytest.mark.slow)
        for case in itertools.product(("epsilon", "sample", "v_prediction"), (0.5, 1.0), CLIPPING)
    ],
)
def test_matches_trl_in_float64(prediction: str, eta: float, clipping: str) -> None:
    schedule: NoiseSchedule = dataclasses.replace(
        SD_SCHEDULE, prediction_type=prediction, **CLIPPING[clipping]
    )
    with np.load(GOLDEN) as stored, jax.enable_x64(True):
        given = {name: stored[f"step_{name}"] for name in ("latents", "output", "noise")}
        x, out, z = (jnp.asarray(v.transpose(0, 2, 3, 1)) for v in given.values())
        steps = denoising_steps(schedule, 50, eta, dtype=np.float64)
        ids = step_of_timesteps(steps, jnp.asarray(stored["step_timesteps"], jnp.int32))
        for corrected in (False, True):
            taken = ddim_step(
                x,
                out,
                z,
                steps_of_rows(steps, ids),
                schedule=schedule,
                use_clipped_model_output=corrected,
            )
            case = f"step_{prediction}_{eta}_{clipping}_{int(corrected)}"
            wanted = stored[f"{case}_next"].transpose(0, 2, 3, 1)
            np.testing.assert_allclose(taken.next_latents, wanted, rtol=0, atol=1e-12)
            np.testing.assert_allclose(taken.logprobs, stored[f"{case}_logprobs"], rtol=0, atol=1e-12)
