# SPDX-License-Identifier: Apache-2.0
"""Flow matching as a sampler with densities: levels of noise σ from 1 to 0, and the SDE steps between them.

A rectified flow mixes clean latents and noise in a straight line, x_σ = (1−σ)·x0 + σ·ε, and its network predicts the
velocity v = ε − x0. The step of Flow-GRPO's SDE is DDIM's with other coefficients, so samplers and learners take both
alike. Like those of `noise_schedule` they are computed once on the host, in float64.

Reference: Liu et al. 2022, arXiv:2209.03003; the SDE: Liu et al. 2025 (Flow-GRPO), arXiv:2505.05470, eqs. 8 and 9; the
shift of levels: Esser et al. 2024, arXiv:2403.03206, section 5.3.2.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jrl.ops.noise_schedule import DenoisingSteps, NoiseSchedule
from jrl.ops.scheduler_keys import FLOW_FIXED, read_keys

FLOW_CLASS = "FlowMatchEulerDiscreteScheduler"
FLOW_PREDICTION = "flow_prediction"
SPACINGS = ("trained", "uniform")
PREDICTED = (FLOW_PREDICTION, "sample")
_PURE_NOISE = 1.0 - 1e-9
"""Levels above this count as 1, where the rate of the SDE has no limit."""


def _exponential(mu: float, levels: np.ndarray) -> np.ndarray:
    found: np.ndarray = math.exp(mu) / (math.exp(mu) + (1.0 / levels - 1.0))
    return found


def _linear(mu: float, levels: np.ndarray) -> np.ndarray:
    found: np.ndarray = mu / (mu + (1.0 / levels - 1.0))
    return found


TIME_SHIFTS: Mapping[str, Callable[[float, np.ndarray], np.ndarray]] = {
    "exponential": _exponential,
    "linear": _linear,
}


@dataclass(frozen=True)
class FlowSchedule:
    """A rectified flow's schedule, with the keys and defaults of diffusers' `FlowMatchEulerDiscreteScheduler`.

    Attributes:
      num_train_timesteps: The network is told σ times this.
      shift: s of σ ← s·σ/(1 + (s − 1)·σ): above 1, more steps are spent where there is much noise.
      use_dynamic_shifting: The shift depends on the image's size, and `shift` is not used: see `at_resolution`.
      base_shift: μ of an image of `base_image_seq_len` patches.
      max_shift: μ of one of `max_image_seq_len`; sizes between and beyond lie on the line through both.
      base_image_seq_len: See `base_shift`.
      max_image_seq_len: See `max_shift`.
      shift_terminal: Level that the last step starts from: all are stretched to reach it; None: as they are.
      time_shift_type: Name of `TIME_SHIFTS`.
      spacing: Levels before the shift: "trained", from the largest to the smallest of training as the pipeline of
        Stable Diffusion 3 has them, or "uniform", from 1 to 1/T as that of Flux.
      prediction_type: What the network's output is: the velocity, or the clean latents.
      resolution_shift: μ of the size in use, from `at_resolution`; None: not set.
    Example:
      >>> FlowSchedule(shift=3.0, spacing="uniform").sigmas(2).tolist()  # 3·½ / (1 + 2·½)
      [1.0, 0.75, 0.0]
    """

    num_train_timesteps: int = 1000
    shift: float = 1.0
    use_dynamic_shifting: bool = False
    base_shift: float = 0.5
    max_shift: float = 1.15
    base_image_seq_len: int = 256
    max_image_seq_len: int = 4096
    shift_terminal: float | None = None
    time_shift_type: str = "exponential"
    spacing: str = "trained"
    prediction_type: str = FLOW_PREDICTION
    resolution_shift: float | None = None

    def __post_init__(self) -> None:
        """Refuses values that have no meaning here.

        Raises:
          ValueError: Naming the key of the scheduler's configuration.
        """
        terminal = self.shift_terminal
        for name, holds, expected in (
            ("num_train_timesteps", self.num_train_timesteps >= 1, "at least 1"),
            ("shift", self.shift > 0, "positive"),
            (
                "max_image_seq_len",
                self.max_image_seq_len > self.base_image_seq_len,
                f"above `base_image_seq_len` = {self.base_image_seq_len}",
            ),
            ("shift_terminal", terminal is None or 0 < terminal < 1, "in (0, 1), or None"),
            ("time_shift_type", self.time_shift_type in TIME_SHIFTS, f"one of {sorted(TIME_SHIFTS)}"),
            ("spacing", self.spacing in SPACINGS, f"one of {SPACINGS}"),
            ("prediction_type", self.prediction_type in PREDICTED, f"one of {PREDICTED}"),
        ):
            if not holds:
                raise ValueError(
                    f"the flow schedule's `{name}` must be {expected}, got {getattr(self, name)!r}."
                )

    def at_resolution(self, num_patches: int) -> FlowSchedule:
        """The schedule for images of so many patches; itself where the shift does not depend on the size.

        Args:
          num_patches: Tokens that the network makes of the latents.
        """
        if not self.use_dynamic_shifting:
            return self
        slope = (self.max_shift - self.base_shift) / (self.max_image_seq_len - self.base_image_seq_len)
        return replace(
            self, resolution_shift=self.base_shift + slope * (num_patches - self.base_image_seq_len)
        )

    def sigmas(self, num_steps: int) -> np.ndarray:
        """Levels of noise, (T + 1,) float64 from at most 1 down to 0.

        Args:
          num_steps: T >= 1.
        Raises:
          ValueError: If T is out of range, or the shift depends on a size that nobody has set.
        """
        count = self.num_train_timesteps
        if not 1 <= num_steps <= count:
            raise ValueError(
                f"`num_steps` must be in 1..{count}, the timesteps of training, got {num_steps}."
            )
        lowest = 1.0 / (num_steps if self.spacing == "uniform" else count)
        if self.spacing == "trained" and not self.use_dynamic_shifting:
            # The levels of training are shifted by the fixed shift already, and then once more.
            lowest = float(self._shifted(np.array([lowest]))[0])
        shifted = self._shifted(np.linspace(1.0, lowest, num_steps))
        if self.shift_terminal is not None:
            if num_steps == 1:
                raise ValueError("`num_steps` must be at least 2 with `shift_terminal`, got 1.")
            shifted = 1.0 - (1.0 - shifted) * (1.0 - self.shift_terminal) / (1.0 - shifted[-1])
        return np.append(shifted, 0.0)

    def steps(self, num_steps: int, eta: float, *, dtype: Any = np.float32) -> DenoisingSteps:
        """Coefficients of T steps; see `flow_steps`.

        Args:
          num_steps: T.
          eta: Noise level a.
          dtype: Of the coefficients.
        """
        return flow_steps(self, num_steps, eta, dtype=dtype)

    def _shifted(self, levels: np.ndarray) -> np.ndarray:
        if not self.use_dynamic_shifting:
            fixed: np.ndarray = self.shift * levels / (1.0 + (self.shift - 1.0) * levels)
            return fixed
        if self.resolution_shift is None:
            raise ValueError(
                "`use_dynamic_shifting` needs the size of the images: call `at_resolution(num_patches)` first."
            )
        return TIME_SHIFTS[self.time_shift_type](self.resolution_shift, levels)


Schedule = NoiseSchedule | FlowSchedule
"""What a diffusion model was trained with, and so how it is sampled."""


def flow_steps(
    schedule: FlowSchedule, num_steps: int, eta: float, *, dtype: Any = np.float32
) -> DenoisingSteps:
    """Coefficients of the SDE of Flow-GRPO in `num_steps` steps from σ to σ' < σ; at a = 0 of Euler's steps.

        s² = a²·σ/(1 − σ),   Δ = σ − σ'
        μ  = x·(1 − s²/(2σ)·Δ) − v·(1 + s²·(1 − σ)/(2σ))·Δ          as published
           = (1 − σ')·x̂0 + (σ' − s²·Δ/(2σ))·ε̂                       the same, in DDIM's terms
        x' = μ + s·√Δ·z

    With x̂0 = x − σ·v and ε̂ = x + (1 − σ)·v. The SDE has the marginals of the flow at every a; a step has them up to an
    error of order Δ², where the share of noise √((σ' − s²Δ/(2σ))² + s²Δ) is not exactly σ'. At σ = 1, where s is
    infinite, σ' takes the place of σ in 1 − σ. The last step has noise too: evaluate at a = 0.

    Args:
      schedule: Of the model.
      num_steps: T >= 1.
      eta: Noise level a in [0, 1]; 0.7 is usual, 0 a deterministic sampler without densities.
      dtype: Of the coefficients.
    Returns:
      One entry a step, (T,), in the order of sampling. Timesteps are floating.
    Raises:
      ValueError: If an argument is out of range.
    Reference: Liu et al. 2025 (Flow-GRPO), arXiv:2505.05470, eqs. 8 and 9.
    Example:
      >>> steps = flow_steps(FlowSchedule(spacing="uniform"), 4, 0.0)
      >>> steps.timesteps.tolist(), steps.direction.tolist()
      ([1000.0, 750.0, 500.0, 250.0], [0.75, 0.5, 0.25, 0.0])
    """
    if not 0 <= eta <= 1:
        raise ValueError(f"`eta`, the noise level, must be in [0, 1], got {eta}.")
    levels = schedule.sigmas(num_steps)
    now, after = levels[:-1], levels[1:]
    length = now - after
    rate = eta**2 * now / (1.0 - np.where(now > _PURE_NOISE, after, now))
    coefficients: tuple[Any, ...] = (
        now * schedule.num_train_timesteps,
        1.0 - now,
        now,
        1.0 - after,
        after - rate * length / (2.0 * now),
        np.sqrt(rate * length),
    )
    return DenoisingSteps(*(x.astype(dtype) for x in coefficients))


def make_flow_schedule(config: Mapping[str, Any], *, spacing: str = "trained") -> FlowSchedule:
    """The schedule of a flow-matching checkpoint, from the dictionary of its `scheduler_config.json`.

    Args:
      config: Keys of diffusers' `FlowMatchEulerDiscreteScheduler`.
      spacing: Of the model's pipeline; see `FlowSchedule`.
    Returns:
      A schedule, with the defaults of `FlowSchedule` for what the dictionary does not name.
    Raises:
      ValueError: If the scheduler is another one, a key is unknown, or a value is of a wrong kind or not implemented.
    Reference: diffusers, `FlowMatchEulerDiscreteScheduler`.
    Example:
      >>> make_flow_schedule({"shift": 3.0}).shift
      3.0
    """
    kind = config.get("_class_name", FLOW_CLASS)
    if kind != FLOW_CLASS:
        raise ValueError(f"the scheduler of a flow must be {FLOW_CLASS}, got {kind!r}.")
    own = ("spacing", "prediction_type", "resolution_shift")
    kinds = {
        field.name: str(field.type) for field in dataclasses.fields(FlowSchedule) if field.name not in own
    }
    given = read_keys(config, kinds, fixed=FLOW_FIXED, silent={})
    return FlowSchedule(**given, spacing=spacing)
