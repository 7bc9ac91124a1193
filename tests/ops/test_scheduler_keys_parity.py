# SPDX-License-Identifier: Apache-2.0
"""Every key of diffusers' schedulers: changed, both sides agree, or jrl refuses, or diffusers does not change."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from diffusers.pipelines.flux.pipeline_flux import calculate_shift  # noqa: E402

from jrl.ops.ddim import ddim_step, steps_of_rows  # noqa: E402
from jrl.ops.flow_schedule import make_flow_schedule  # noqa: E402
from jrl.ops.noise_schedule import make_noise_schedule  # noqa: E402
from jrl.ops.scheduler_keys import NOISE_FIXED, NOISE_SILENT  # noqa: E402

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]

STEPS, PATCHES = 4, 1024
SHAPE = (2, 4, 4, 3)
SD = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "clip_sample": False,
    "set_alpha_to_one": False,
    "steps_offset": 1,
}
FLOWS = {"plain": {"shift": 3.0}, "dynamic": {"use_dynamic_shifting": True, "shift": 3.0}}
CLASSES = (
    *("DDIMScheduler", "PNDMScheduler", "EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler"),
    *("DDPMScheduler", "DPMSolverMultistepScheduler", "UniPCMultistepScheduler", "LCMScheduler"),
)
OTHERS: dict[str, list[Any]] = {
    "beta_schedule": ["linear", "scaled_linear"],
    "prediction_type": ["v_prediction"],
    "timestep_spacing": ["trailing", "leading"],
    "trained_betas": [np.linspace(0.001, 0.02, 1000).tolist()],
    "timestep_type": ["continuous"],
    "time_shift_type": ["linear"],
    "shift_terminal": [0.1],
    "variance_type": ["learned_range"],
    "disable_corrector": [[0]],
}
"""Values that a key takes, where its default does not tell."""
REPAIRED = {"set_alpha_to_one"}
"""Keys whose other value is announced and not followed."""


def keys_of(name: str) -> dict[str, Any]:
    """Every key of a scheduler's class, with its default."""
    parameters = inspect.signature(getattr(diffusers, name).__init__).parameters
    return {key: parameter.default for key, parameter in parameters.items() if key != "self"}


def other_values(key: str, default: Any) -> Iterator[Any]:
    """Values that are not the default."""
    if key in OTHERS:
        yield from (value for value in OTHERS[key] if value != default)
    elif isinstance(default, bool):
        yield not default
    elif isinstance(default, int):
        yield default + 500
    elif isinstance(default, float):
        yield 0.015 if default == float("-inf") else default * 0.25 + 0.01
    else:
        yield 0.5


def test_every_key_has_another_value() -> None:
    for name in (*CLASSES, "FlowMatchEulerDiscreteScheduler"):
        for key, default in keys_of(name).items():
            others = list(other_values(key, default))
            assert others and default not in others, key


def draws() -> tuple[np.ndarray, ...]:
    """Latents, and of every step the network's output and noise."""
    rng = np.random.default_rng(0)
    found: list[np.ndarray] = [
        rng.normal(size=size).astype(np.float32) for size in (SHAPE, (2, STEPS, *SHAPE))
    ]
    return found[0], *found[1]


def torch_noise_steps(config: dict[str, Any]) -> np.ndarray:
    """Latents after every step of DDIM, and its timesteps, as the pipeline of Stable Diffusion reads such a file."""
    parts = dict.fromkeys(("vae", "text_encoder", "tokenizer", "unet", "safety_checker", "feature_extractor"))
    scheduler = diffusers.DDIMScheduler.from_config(config)
    pipeline = diffusers.StableDiffusionPipeline(**parts, scheduler=scheduler, requires_safety_checker=False)
    scheduler = pipeline.scheduler
    scheduler.set_timesteps(STEPS)
    latents, outputs, noise = (torch.tensor(np.moveaxis(part, -1, -3)) for part in draws())
    after = []
    for step, timestep in enumerate(scheduler.timesteps):
        found = scheduler.step(outputs[step], timestep, latents, eta=0.7, variance_noise=noise[step])
        latents = found.prev_sample
        after.append(np.moveaxis(latents.numpy(), 1, -1).ravel())
    return np.concatenate([*after, scheduler.timesteps.numpy() / 1000])


def torch_flow_steps(config: dict[str, Any], spacing: str) -> np.ndarray:
    """Latents after every step, and its timesteps, as the pipelines of Stable Diffusion 3 and Flux call it."""
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_config(config)
    keys = scheduler.config
    sizes = (keys[key] for key in ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift"))
    mu = calculate_shift(PATCHES, *sizes) if keys.use_dynamic_shifting else None
    sigmas = np.linspace(1.0, 1 / STEPS, STEPS) if spacing == "uniform" else None
    scheduler.set_timesteps(STEPS, sigmas=sigmas, mu=mu)
    latents, outputs, _ = (torch.tensor(part) for part in draws())
    after = []
    for step, timestep in enumerate(scheduler.timesteps):
        latents = scheduler.step(outputs[step], timestep, latents).prev_sample
        after.append(latents.numpy().ravel())
    return np.concatenate([*after, scheduler.timesteps.numpy() / 1000])


def jrl_steps(schedule: Any, eta: float) -> np.ndarray:
    """The same of jrl."""
    steps = schedule.steps(STEPS, eta)
    latents, outputs, noise = map(jnp.asarray, draws())
    after = []
    for step in range(STEPS):
        at = steps_of_rows(steps, jnp.full(SHAPE[0], step))
        latents = ddim_step(latents, outputs[step], noise[step], at, schedule=schedule).next_latents
        after.append(latents.ravel())
    return np.concatenate([*after, steps.timesteps / 1000])


def outcome(key: str, ours: Any, theirs: Any, plain: np.ndarray) -> str:
    """What becomes of a change: "refused", "agree", "silent in diffusers", or how jrl differs.

    Args:
      key: That was changed.
      ours: Gives jrl's numbers.
      theirs: Gives diffusers'.
      plain: Those without the change.
    """
    try:
        wanted = theirs()
    except (ValueError, NotImplementedError, ImportError):
        return "diffusers refuses"
    is_silent = np.array_equal(wanted, plain)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = ours()
    except ValueError as error:
        return "refused" if f"`{key}`" in str(error) else str(error)
    if key in REPAIRED and any(f"`{key}`" in str(warning.message) for warning in caught):
        return "announced" if np.abs(found - plain).max() < 1e-3 else "announced, and something else done"
    error = float(np.abs(found - wanted).max() / np.abs(wanted[:-STEPS]).max())
    if error > 1e-5:
        return f"off by {error:.1e}"
    return "silent in diffusers" if is_silent else "agree"


FINE = ("agree", "refused", "silent in diffusers", "diffusers refuses", "announced")


@pytest.mark.parametrize("name", CLASSES)
def test_every_key_of_a_model_with_betas(name: str) -> None:
    own = keys_of(name)
    if name != "DDIMScheduler":
        own = {key: default for key, default in own.items() if key not in keys_of("DDIMScheduler")}
    base = {"_class_name": name, **SD}
    plain = torch_noise_steps(base)
    found = {}
    for key, default in own.items():
        for value in other_values(key, base.get(key, default)):
            config = {**base, key: value}
            found[key, str(value)[:20]] = outcome(
                key,
                lambda config=config: jrl_steps(make_noise_schedule(config), 0.7),
                lambda config=config: torch_noise_steps(config),
                plain,
            )
    assert not {key: what for key, what in found.items() if what not in FINE}
    if name == "DDIMScheduler":
        assert list(found.values()).count("agree") >= 8 and "announced" in found.values()


@pytest.mark.parametrize("spacing", ["trained", "uniform"])
@pytest.mark.parametrize("base", FLOWS)
def test_every_key_of_a_flow(base: str, spacing: str) -> None:
    plain = torch_flow_steps(FLOWS[base], spacing)
    found = {}
    for key, default in keys_of("FlowMatchEulerDiscreteScheduler").items():
        for value in other_values(key, FLOWS[base].get(key, default)):
            config = {**FLOWS[base], key: value}
            found[key, value] = outcome(
                key,
                lambda config=config: jrl_steps(
                    make_flow_schedule(config, spacing=spacing).at_resolution(PATCHES), 0.0
                ),
                lambda config=config: torch_flow_steps(config, spacing),
                plain,
            )
    assert not {key: what for key, what in found.items() if what not in FINE}
    assert {"agree", "refused"} <= {*found.values()}


def test_every_known_key_is_one_of_some_scheduler() -> None:
    names = {name for name in dir(diffusers) if name.endswith("Scheduler") and not name.startswith("Flax")}
    known = {key for name in names for key in keys_of(name)}
    assert {*NOISE_FIXED, *NOISE_SILENT} - known == {"tensor_format", "timestep_values"}
