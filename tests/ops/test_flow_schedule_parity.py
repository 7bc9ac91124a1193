# SPDX-License-Identifier: Apache-2.0
"""Levels and Euler's steps of a flow against diffusers' own scheduler."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from diffusers import FlowMatchEulerDiscreteScheduler  # noqa: E402
from diffusers.pipelines.flux.pipeline_flux import calculate_shift  # noqa: E402

from jrl.ops.ddim import ddim_step, steps_of_rows  # noqa: E402
from jrl.ops.flow_schedule import FlowSchedule, make_flow_schedule  # noqa: E402

pytestmark = pytest.mark.parity

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "stable diffusion 3": {"shift": 3.0},
    "flux": {"shift": 3.0, "use_dynamic_shifting": True},
    "linear": {"use_dynamic_shifting": True, "time_shift_type": "linear", "base_shift": 0.7},
    "terminal": {"shift": 2.0, "shift_terminal": 0.1},
    "other sizes": {
        "use_dynamic_shifting": True,
        "base_image_seq_len": 100,
        "max_image_seq_len": 900,
        "num_train_timesteps": 500,
    },
}


def both(case: str, spacing: str, num_patches: int, num_steps: int) -> tuple[FlowSchedule, Any]:
    theirs = FlowMatchEulerDiscreteScheduler(**CASES[case])
    keys = theirs.config
    sizes = (keys[k] for k in ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift"))
    mu = calculate_shift(num_patches, *sizes) if keys.use_dynamic_shifting else None
    sigmas = np.linspace(1.0, 1 / num_steps, num_steps) if spacing == "uniform" else None
    theirs.set_timesteps(num_steps, sigmas=sigmas, mu=mu)
    config = {"_class_name": "FlowMatchEulerDiscreteScheduler", **keys}
    return make_flow_schedule(config, spacing=spacing).at_resolution(num_patches), theirs


@pytest.mark.parametrize("spacing", ["trained", "uniform"])
@pytest.mark.parametrize("case", CASES)
def test_levels_and_timesteps(case: str, spacing: str) -> None:
    for num_patches in (64, 1024, 4096):
        for num_steps in (2, 10, 28, 50):
            ours, theirs = both(case, spacing, num_patches, num_steps)
            np.testing.assert_allclose(ours.sigmas(num_steps), theirs.sigmas, atol=1e-6)
            wanted = theirs.timesteps / theirs.config.num_train_timesteps
            found = ours.steps(num_steps, 0.0).timesteps / theirs.config.num_train_timesteps
            np.testing.assert_allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_steps_without_noise(case: str) -> None:
    ours, theirs = both(case, "trained", 1024, 10)
    random = np.random.default_rng(0)
    x, v = random.standard_normal((2, 10, 3, 4, 2)).astype(np.float32)
    found = ddim_step(
        jnp.asarray(x),
        jnp.asarray(v),
        jnp.zeros_like(x),
        steps_of_rows(ours.steps(10, 0.0), jnp.arange(10)),
        schedule=ours,
    )
    for row, timestep in enumerate(theirs.timesteps):
        wanted = theirs.step(torch.from_numpy(v[row]), timestep, torch.from_numpy(x[row])).prev_sample
        np.testing.assert_allclose(found.next_latents[row], wanted, rtol=1e-6, atol=1e-6)
