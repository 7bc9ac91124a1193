# SPDX-License-Identifier: Apache-2.0
"""DDIM as scripts of diffusers look at it: a configuration, and timesteps once their number is set."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from jrl.ops.noise_schedule import DenoisingSteps, NoiseSchedule, denoising_steps


class DDIMScheduler:
    """The steps of a noise schedule.

    Args:
      schedule: Of the model.

    Attributes:
      config: Keys of the schedule.
      init_noise_sigma: What the first noise is multiplied by: 1.
      num_inference_steps: As set; None before.
      timesteps: Descending; empty before.
    """

    init_noise_sigma = 1.0

    def __init__(self, schedule: NoiseSchedule) -> None:
        self._schedule = schedule
        self.config: dict[str, Any] = asdict(schedule)
        self.num_inference_steps: int | None = None
        self.timesteps = np.zeros(0, np.int32)

    @property
    def alphas_cumprod(self) -> np.ndarray:
        """ᾱ of every training timestep, float64."""
        return self._schedule.alphas_cumprod

    def set_timesteps(self, num_inference_steps: int) -> None:
        """Sets T.

        Raises:
          ValueError: If there are not so many timesteps.
        """
        steps = denoising_steps(self._schedule, num_inference_steps, 0.0)
        self.num_inference_steps, self.timesteps = num_inference_steps, np.asarray(steps.timesteps)

    def steps(self, eta: float) -> DenoisingSteps:
        """Coefficients of all steps.

        Args:
          eta: η.
        Raises:
          ValueError: If T is not set.
        """
        if self.num_inference_steps is None:
            raise ValueError("`scheduler.set_timesteps` must be called before a step is taken.")
        return denoising_steps(self._schedule, self.num_inference_steps, eta)

    def check_timesteps(self, timesteps: np.ndarray) -> None:
        """Refuses what is no timestep of a step.

        Raises:
          ValueError: Naming those that are.
        """
        if not np.isin(timesteps, self.timesteps).all():
            raise ValueError(
                f"`timestep` must be one of the scheduler's {self.timesteps.tolist()}, got {timesteps.tolist()}."
            )
