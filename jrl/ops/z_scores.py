# SPDX-License-Identifier: Apache-2.0
"""The z-score, which advantages and rewards share: plain arithmetic, so that NumPy and JAX both use it."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from jaxtyping import Array

Values = TypeVar("Values", np.ndarray, Array)
"""Arrays of the host or of a device."""


def z_scores(x: Values, *, mean: Values | float, std: Values | float, epsilon: float) -> Values:
    """(x − μ)/(σ + ε): distance from the mean in units of the deviation.

    Args:
      x: Values.
      mean: μ, of these values or of others; it broadcasts against them.
      std: σ >= 0, likewise.
      epsilon: ε > 0, outside the root.
    Returns:
      Of the shape of `x`, without unit.
    Reference: none; the z-score.
    Example:
      >>> z_scores(np.array([1.0, 3.0]), mean=2.0, std=1.0, epsilon=1e-8).round(4).tolist()
      [-1.0, 1.0]
    """
    found: Values = (x - mean) / (std + epsilon)
    return found
