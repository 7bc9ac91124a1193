# SPDX-License-Identifier: Apache-2.0
"""Objects with a state of their own over the pure functions of `jrl.ops`: seeds, running moments, KL controllers."""

from __future__ import annotations

import random
from typing import Any

import jax.numpy as jnp
import numpy as np

from jrl.ops import kl, moments
from jrl.trainers.rollouts.draws import reseed


def set_seed(seed: int) -> None:
    """Seeds what scripts draw from: Python's and NumPy's global generators, and every model's `generate`.

    Shuffled loaders and samplers of lengths draw from the generators. Sampling calls count from 0 again. The order in
    which a trainer learns depends on its configuration's `seed` alone.
    """
    seed_generators(seed)
    reseed(seed)


def seed_generators(seed: int) -> None:
    """Python's and NumPy's alone."""
    random.seed(seed)
    np.random.seed(seed)


class RunningMoments:
    """Mean and variance of all values so far.

    Args:
      so_far: Of the values before; None: there are none.

    Attributes:
      mean: Of all values; 0 before the first.
      std: Their standard deviation with n − 1 in the denominator; 1 where there is no spread.
      var: Their population variance.
      count: Their number.
    """

    def __init__(self, so_far: moments.RunningMoments | None = None) -> None:
        self._moments = moments.init_moments() if so_far is None else so_far

    @property
    def mean(self) -> float:
        """Mean of all values."""
        return float(self._moments.mean)

    @property
    def std(self) -> float:
        """Standard deviation, n − 1."""
        return float(moments.moments_std(self._moments))

    @property
    def var(self) -> float:
        """Population variance."""
        return float(self._moments.variance)

    @property
    def count(self) -> float:
        """Number of values."""
        return float(self._moments.num_values)

    def update(self, xs: Any) -> tuple[float, float]:
        """Takes a batch into account; returns mean and standard deviation (n − 1) of the batch alone."""
        x = jnp.asarray(np.asarray(xs), jnp.float32).ravel()
        self._moments, mean, std = moments.update_moments(self._moments, x, jnp.ones(x.shape, bool))
        return float(mean), float(std)


class AdaptiveKLController:
    """Moves the KL coefficient so that the KL per sequence comes to `target`; see `jrl.ops.adaptive_kl_coef`.

    Attributes:
      value: The coefficient.
      target: In nats per sequence.
      horizon: Samples over which the coefficient may change by a fifth.
    """

    def __init__(self, init_kl_coef: float, target: float, horizon: float) -> None:
        self.value, self.target, self.horizon = float(init_kl_coef), target, horizon

    def update(self, current: float, n_steps: int) -> None:
        """Answers to the KL of the last `n_steps` samples."""
        new = kl.adaptive_kl_coef(
            jnp.float32(self.value),
            float(current),
            target_kl=self.target,
            horizon=self.horizon,
            num_rollouts=n_steps,
        )
        self.value = float(new)


class FixedKLController:
    """A KL coefficient that stays.

    Attributes:
      value: The coefficient.
    """

    def __init__(self, kl_coef: float) -> None:
        self.value = float(kl_coef)

    def update(self, current: float, n_steps: int) -> None:
        """Does nothing."""
        del current, n_steps
