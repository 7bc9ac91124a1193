# SPDX-License-Identifier: Apache-2.0
"""Schedules and steps against diffusers' own DDIM scheduler."""

from __future__ import annotations

import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from diffusers.schedulers.scheduling_ddim import rescale_zero_terminal_snr  # noqa: E402

from jrl.ops.ddim import ddim_step, step_of_timesteps, steps_of_rows  # noqa: E402
from jrl.ops.noise_schedule import NoiseSchedule, denoising_steps  # noqa: E402

pytestmark = pytest.mark.parity

SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "clip_sample": False}
CASES: dict[str, dict[str, Any]] = {
    "stable diffusion": {**SD, "steps_offset": 1},
    "linear": {"beta_schedule": "linear"},
    "cosine": {"beta_schedule": "squaredcos_cap_v2"},
    "trained": {"trained_betas": tuple(np.linspace(0.001, 0.02, 1000).tolist())},
    "trailing": {**SD, "timestep_spacing": "trailing"},
    "linspace": {**SD, "timestep_spacing": "linspace"},
    "zero snr": {
        **SD,
        "rescale_betas_zero_snr": True,
        "prediction_type": "v_prediction",
        "timestep_spacing": "trailing",
    },
}


def both(**changes: Any) -> tuple[NoiseSchedule, Any]:
    given = (
        {**changes, "trained_betas": list(changes["trained_betas"])}
        if "trained_betas" in changes
        else changes
    )
    return NoiseSchedule(**changes), diffusers.DDIMScheduler(**given, set_alpha_to_one=False)


@pytest.mark.parametrize("case", CASES)
def test_betas_levels_and_timesteps(case: str) -> None:
    schedule, scheduler = both(**CASES[case])
    if schedule.rescale_betas_zero_snr:
        # In float32, ratios of the last levels, which go to 0, keep five digits: the same function in float64.
        ramp = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
        np.testing.assert_allclose(schedule.betas, rescale_zero_terminal_snr(ramp), atol=1e-12)
    else:
        np.testing.assert_allclose(schedule.betas, scheduler.betas, atol=1e-6)
    np.testing.assert_allclose(schedule.alphas_cumprod, scheduler.alphas_cumprod, atol=1e-6)
    for num_steps in (5, 30, 50):
        scheduler.set_timesteps(num_steps)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            steps = denoising_steps(schedule, num_steps, 0.0)
        assert steps.timesteps.tolist() == scheduler.timesteps.tolist()


@pytest.mark.parametrize("prediction", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_steps(prediction: str, eta: float) -> None:
    clipping: dict[str, dict[str, Any]] = {
        "plain": {},
        "clip": {"clip_sample": True},
        "threshold": {
            "thresholding": True,
            "dynamic_thresholding_ratio": 0.9,
            "sample_max_value": 1.5,
        },
    }
    rng = np.random.default_rng(0)
    latents, output, noise = rng.normal(size=(3, 1, 4, 4, 4)).astype(np.float32)
    as_torch = [torch.tensor(np.moveaxis(x, -1, 1)) for x in (latents, output, noise)]
    for changes in clipping.values():
        for corrected in (False, True):
            schedule, scheduler = both(**{**SD, "steps_offset": 1, "prediction_type": prediction, **changes})
            scheduler.set_timesteps(50)
            steps = denoising_steps(schedule, 50, eta)
            for timestep in (981, 501, 21):
                wanted = scheduler.step(
                    as_torch[1],
                    timestep,
                    as_torch[0],
                    eta=eta,
                    use_clipped_model_output=corrected,
                    variance_noise=as_torch[2],
                ).prev_sample.numpy()
                ids = step_of_timesteps(steps, jnp.array([timestep], jnp.int32))
                found = ddim_step(
                    *(jnp.asarray(x) for x in (latents, output, noise)),
                    steps_of_rows(steps, ids),
                    schedule=schedule,
                    use_clipped_model_output=corrected,
                ).next_latents
                np.testing.assert_allclose(
                    found, np.moveaxis(wanted, 1, -1), rtol=1e-5, atol=1e-5, err_msg=str(timestep)
                )
