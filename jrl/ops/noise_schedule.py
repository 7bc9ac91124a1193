# SPDX-License-Identifier: Apache-2.0
"""Noise schedules of diffusion models, and the coefficients of the DDIM steps that remove the noise.

Everything here is host arithmetic in float64, done once: timesteps and coefficients depend on no data. Coefficients
are rounded to float32 at the end, so that σ of the last step, whose 1 − ᾱ is below 1e-3, keeps all its digits.

Reference: Ho et al. 2020, arXiv:2006.11239; DDIM: Song et al. 2021, arXiv:2010.02502; zero terminal SNR: Lin et al.
2024, arXiv:2305.08891.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Float, Num

from jrl.ops.predictions import PREDICTIONS
from jrl.ops.scheduler_keys import NOISE_FIXED, NOISE_SILENT, read_keys


def _linear(start: float, end: float, count: int) -> np.ndarray:
    return np.linspace(start, end, count)


def _scaled_linear(start: float, end: float, count: int) -> np.ndarray:
    return np.square(np.linspace(math.sqrt(start), math.sqrt(end), count))


def _squared_cosine(start: float, end: float, count: int) -> np.ndarray:
    del start, end  # the curve has no free ends
    level = np.square(np.cos((np.arange(count + 1) / count + 0.008) / 1.008 * math.pi / 2))
    return np.minimum(1.0 - level[1:] / level[:-1], 0.999)


BETA_SCHEDULES: Mapping[str, Callable[[float, float, int], np.ndarray]] = {
    "linear": _linear,
    "scaled_linear": _scaled_linear,
    "squaredcos_cap_v2": _squared_cosine,
}


def _leading(count: int, steps: int, offset: int) -> np.ndarray:
    return np.arange(steps)[::-1] * (count // steps) + offset


def _linspace(count: int, steps: int, offset: int) -> np.ndarray:
    del offset
    return np.round(np.linspace(0, count - 1, steps))[::-1]


def _trailing(count: int, steps: int, offset: int) -> np.ndarray:
    del offset
    # By numbers of steps: a range in strides of count/steps may have an entry too many.
    return np.round(count - np.arange(steps) * count / steps) - 1


SPACINGS: Mapping[str, Callable[[int, int, int], np.ndarray]] = {
    "leading": _leading,
    "linspace": _linspace,
    "trailing": _trailing,
}


class DenoisingSteps(NamedTuple):
    """Coefficients of the T steps from noise to clean latents (host arrays), or of some of them, one a row.

    Attributes:
      timesteps: What the network is told, descending: whole numbers, or those of a flow.
      signal: √ᾱ_t, the share of the clean latents before the step.
      noise: √(1 − ᾱ_t), the share of noise before the step.
      next_signal: √ᾱ_p after it.
      direction: √(1 − ᾱ_p − σ_t²), the share of the predicted noise after it.
      std: σ_t of the fresh noise; 0 throughout for η = 0.
    """

    timesteps: Num[Array, "T"]
    signal: Float[Array, "T"]
    noise: Float[Array, "T"]
    next_signal: Float[Array, "T"]
    direction: Float[Array, "T"]
    std: Float[Array, "T"]


@dataclass(frozen=True)
class NoiseSchedule:
    """A noise schedule with the keys and defaults of diffusers' DDIM scheduler, taken as they are.

    Attributes:
      num_train_timesteps: Timesteps that the network was trained on.
      beta_start: First β.
      beta_end: Last β.
      beta_schedule: Name of `BETA_SCHEDULES`.
      trained_betas: The β themselves, in place of the three above.
      clip_sample: Whether the predicted clean latents are clipped to ±`clip_sample_range`.
      steps_offset: Added to the timesteps of the spacing "leading".
      prediction_type: What the network's output is: the noise, the clean latents, or v = √ᾱ·ε − √(1−ᾱ)·x̂0.
      thresholding: Whether the predicted clean latents are clipped to a quantile of their own, in place of the above.
      dynamic_thresholding_ratio: That quantile.
      clip_sample_range: See `clip_sample`.
      sample_max_value: Largest threshold.
      timestep_spacing: Name of `SPACINGS`.
      rescale_betas_zero_snr: Whether the last timestep is made pure noise.
    Example:
      >>> schedule = NoiseSchedule(num_train_timesteps=2, beta_start=0.5, beta_end=0.5)
      >>> schedule.alphas_cumprod.round(4).tolist()
      [0.5, 0.25]
    """

    num_train_timesteps: int = 1000
    beta_start: float = 0.0001
    beta_end: float = 0.02
    beta_schedule: str = "linear"
    trained_betas: tuple[float, ...] | None = None
    clip_sample: bool = True
    steps_offset: int = 0
    prediction_type: str = "epsilon"
    thresholding: bool = False
    dynamic_thresholding_ratio: float = 0.995
    clip_sample_range: float = 1.0
    sample_max_value: float = 1.0
    timestep_spacing: str = "leading"
    rescale_betas_zero_snr: bool = False

    def __post_init__(self) -> None:
        """Refuses values that have no meaning here.

        Raises:
          ValueError: Naming the key of the scheduler's configuration.
        """
        if self.num_train_timesteps < 1:
            raise ValueError(f"`num_train_timesteps` must be at least 1, got {self.num_train_timesteps}.")
        for name, value, known in (
            ("beta_schedule", self.beta_schedule, sorted(BETA_SCHEDULES)),
            ("prediction_type", self.prediction_type, sorted(set(PREDICTIONS) - {"flow_prediction"})),
            ("timestep_spacing", self.timestep_spacing, sorted(SPACINGS)),
        ):
            if value not in known:
                raise ValueError(f"the noise schedule's `{name}` must be one of {known}, got {value!r}.")
        if self.trained_betas is not None and len(self.trained_betas) != self.num_train_timesteps:
            raise ValueError(
                f"`trained_betas` must have `num_train_timesteps` = {self.num_train_timesteps} entries, got "
                f"{len(self.trained_betas)}."
            )
        if self.rescale_betas_zero_snr and self.prediction_type == "epsilon":
            raise ValueError(
                "`rescale_betas_zero_snr` must be False with `prediction_type` 'epsilon': where nothing is left but "
                "noise, the noise says nothing of the clean latents. Such checkpoints are 'v_prediction'."
            )
        betas = self.betas
        if not (np.all(betas > 0) and np.all(betas[:-1] < 1)):
            raise ValueError(
                f"the noise schedule's β must lie in (0, 1), got {betas.min():g} to {betas.max():g}. Are `beta_start` "
                "and `beta_end` those of the checkpoint?"
            )

    @cached_property
    def betas(self) -> np.ndarray:
        """β of each timestep, (num_train_timesteps,) float64."""
        if self.trained_betas is not None:
            betas = np.asarray(self.trained_betas, np.float64)
        else:
            make = BETA_SCHEDULES[self.beta_schedule]
            betas = make(self.beta_start, self.beta_end, self.num_train_timesteps)
        return _zero_terminal_snr(betas) if self.rescale_betas_zero_snr else betas

    @cached_property
    def log_alphas_cumprod(self) -> np.ndarray:
        """ln ᾱ_t = Σ ln(1 − β), (num_train_timesteps,) float64; −∞ at a last timestep of pure noise."""
        with np.errstate(divide="ignore"):
            logs: np.ndarray = np.cumsum(np.log1p(-self.betas))
        return logs

    @property
    def alphas_cumprod(self) -> np.ndarray:
        """ᾱ_t, (num_train_timesteps,) float64."""
        levels: np.ndarray = np.exp(self.log_alphas_cumprod)
        return levels

    def at_resolution(self, num_patches: int) -> NoiseSchedule:
        """Returns itself: the steps are the same for images of any size."""
        del num_patches
        return self

    def steps(self, num_steps: int, eta: float, *, dtype: Any = np.float32) -> DenoisingSteps:
        """Coefficients of T steps; see `denoising_steps`.

        Args:
          num_steps: T.
          eta: η.
          dtype: Of the coefficients.
        """
        return denoising_steps(self, num_steps, eta, dtype=dtype)


def _zero_terminal_snr(betas: np.ndarray) -> np.ndarray:
    """Shifts √ᾱ so that it ends at 0, and scales it so that it starts where it did."""
    level = np.sqrt(np.cumprod(1.0 - betas))
    level = (level - level[-1]) * (level[0] / (level[0] - level[-1]))
    remaining = np.square(level)
    return 1.0 - np.concatenate([remaining[:1], remaining[1:] / remaining[:-1]])


_OTHER_PROCESSES = {"FlowMatch": "flow matching", "EDM": "levels of noise σ in place of timesteps"}


def make_noise_schedule(config: Mapping[str, Any]) -> NoiseSchedule:
    """The schedule of a Stable Diffusion checkpoint, from the dictionary of its `scheduler_config.json`.

    The checkpoint may name another scheduler, such as PNDM: how that one steps is not read, since DDIM takes its
    place (`jrl.ops.scheduler_keys`). Two keys are repaired, as the checkpoints' own library does: latents are never
    clipped to ±1, and timesteps start at 1. A third is repaired here alone: the last step ends at ᾱ_0.

    Args:
      config: Keys of diffusers' schedulers.
    Returns:
      A schedule, with the defaults of `NoiseSchedule` for what the dictionary does not name.
    Raises:
      ValueError: If the scheduler is one of another process, a key is unknown, or a value is of a wrong kind or not
        implemented.
    Reference: diffusers, `DDIMScheduler.from_config` and the repairs in `StableDiffusionPipeline.__init__`.
    Example:
      >>> make_noise_schedule({"beta_end": 0.012, "steps_offset": 1, "clip_sample": False}).beta_end
      0.012
    """
    kind = str(config.get("_class_name", ""))
    for prefix, meaning in _OTHER_PROCESSES.items():
        if kind.startswith(prefix):
            raise ValueError(f"the scheduler must be one of a model with β, got {kind!r} ({meaning}).")
    kinds = {field.name: str(field.type) for field in dataclasses.fields(NoiseSchedule)}
    given = read_keys(config, kinds, fixed=NOISE_FIXED, silent=NOISE_SILENT)
    if given.get("trained_betas") is not None:
        given.setdefault("num_train_timesteps", len(given["trained_betas"]))
    for name, default, repaired, why in (
        ("steps_offset", 0, 1, "at timestep 0 a step has no density"),
        ("clip_sample", True, False, "latents of Stable Diffusion reach far beyond ±1"),
        ("set_alpha_to_one", kind.startswith("DDIM"), False, "a last step to ᾱ = 1 has no density"),
    ):
        if config.get(name, default) != repaired:
            found = config.get(name, f"nothing, which means {default}")
            warnings.warn(
                f"the scheduler's configuration has {found} for `{name}`; {repaired} is used: {why}.",
                stacklevel=2,
            )
        if name in kinds:
            given[name] = repaired
    return NoiseSchedule(**given)


def denoising_steps(
    schedule: NoiseSchedule, num_steps: int, eta: float, *, dtype: Any = np.float32
) -> DenoisingSteps:
    """Coefficients of DDIM in `num_steps` steps, each from timestep t to p = max(t − stride, 0).

        σ_t² = η²·(1 − ᾱ_p)/(1 − ᾱ_t)·(1 − ᾱ_t/ᾱ_p),   stride = ⌊num_train_timesteps / num_steps⌋

    The last step ends at ᾱ_0 and never at 1: at 1 it would have no noise, and so no density.

    Args:
      schedule: Of the model.
      num_steps: T >= 1, at most the number of training timesteps.
      eta: η in [0, 1]: 1 is the full noise of the reverse process, 0 a deterministic sampler without densities.
      dtype: Of the coefficients.
    Returns:
      One entry a step, (T,), in the order of sampling: from noise to image.
    Raises:
      ValueError: If an argument is out of range, or a step with η > 0 would have no noise.
    Reference: Song et al. 2021, arXiv:2010.02502, eqs. 12 and 16.
    Example:
      >>> denoising_steps(NoiseSchedule(steps_offset=1), 4, 0.0).timesteps.tolist()
      [751, 501, 251, 1]
    """
    count = schedule.num_train_timesteps
    if not 1 <= num_steps <= count:
        raise ValueError(f"`num_steps` must be in 1..{count}, the timesteps of training, got {num_steps}.")
    if not 0 <= eta <= 1:
        raise ValueError(f"`eta` must be in [0, 1], got {eta}.")
    timesteps = SPACINGS[schedule.timestep_spacing](count, num_steps, schedule.steps_offset).astype(np.int32)
    if timesteps.max() >= count:
        raise ValueError(
            f"`steps_offset` = {schedule.steps_offset} puts timestep {timesteps.max()} beyond the {count} of training: "
            f"`num_steps` = {num_steps} is too many for it."
        )
    next_timesteps = np.clip(timesteps - count // num_steps, 0, None)
    if np.any(timesteps[1:] != next_timesteps[:-1]):
        warnings.warn(
            f"`timestep_spacing` {schedule.timestep_spacing!r} in {num_steps} steps: a step does not end where the "
            f"next one begins, since DDIM always goes down by {count // num_steps}.",
            stacklevel=2,
        )
    log_now, log_next = schedule.log_alphas_cumprod[timesteps], schedule.log_alphas_cumprod[next_timesteps]
    noise_now, noise_next = -np.expm1(log_now), -np.expm1(log_next)
    variance = noise_next / noise_now * -np.expm1(log_now - log_next)
    if eta > 0 and not np.all(variance > 0):
        raise ValueError(
            f"`eta` must be 0 with timesteps that reach 0, where a step has no noise and so no density, got {eta}. "
            f"Set `steps_offset` to 1 with the spacing 'leading'; they are {schedule.steps_offset} and "
            f"{schedule.timestep_spacing!r}."
        )
    std = eta * np.sqrt(np.maximum(variance, 0.0))
    coefficients: tuple[Any, ...] = (
        np.exp(log_now / 2),
        np.sqrt(noise_now),
        np.exp(log_next / 2),
        # 0 at a timestep of pure noise, where rounding may leave less.
        np.sqrt(np.maximum(noise_next - np.square(std), 0.0)),
        std,
    )
    starts: Any = timesteps
    return DenoisingSteps(starts, *(x.astype(dtype) for x in coefficients))
