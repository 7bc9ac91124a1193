# SPDX-License-Identifier: Apache-2.0
"""The mean reward of an evaluation with its standard error, and whether two of them differ by more than that."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from jrl.trainers.loggers.jsonl import SAMPLING

MEAN, ERROR = "reward/mean", "reward/standard_error"
"""Names of both figures in a record."""


class EvaluatedReward(NamedTuple):
    """Mean reward of the samples of one record.

    Attributes:
      step: Optimizer steps before it.
      mean: Of the samples.
      error: Standard error of the mean; None: not known, as of a single sample and of older runs.
      samples: Of what there were how many, in words; "": not known.
    """

    step: int
    mean: float
    error: float | None = None
    samples: str = ""

    @classmethod
    def of(cls, record: Mapping[str, Any], *, suffix: str = "") -> EvaluatedReward | None:
        """Reads it from a record; None where its mean is missing or not finite.

        Args:
          record: One line of `metrics.jsonl`.
          suffix: Of the names, where a generation argument is swept.
        """
        mean, error = (_finite(record.get(f"{name}{suffix}")) for name in (MEAN, ERROR))
        if mean is None:
            return None
        return cls(int(record["step"]), mean, error, _samples(record))

    @property
    def figure(self) -> str:
        """Such as "0.594 +- 0.03"; without an error, the mean alone."""
        return f"{self.mean:.3g}" if self.error is None else f"{self.mean:.3g} +- {self.error:.2g}"

    def __str__(self) -> str:
        """Such as "0.594 +- 0.03 (64 prompts)"."""
        return f"{self.figure} ({self.samples})" if self.samples else self.figure

    def is_within_error(self, other: EvaluatedReward) -> bool:
        """True where two means differ by no more than the error of their difference; False where none is known."""
        if self.error is None or other.error is None:
            return False
        return abs(self.mean - other.mean) <= math.hypot(self.error, other.error)


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _samples(record: Mapping[str, Any]) -> str:
    """Such as "64 prompts", or "2 prompts x 32 samples"."""
    prompts, each = (record.get(f"{SAMPLING}{name}") for name in ("num_prompts", "samples_per_prompt"))
    if not isinstance(prompts, int):
        return ""
    said = f"{prompts:,} prompt{'s' if prompts > 1 else ''}"
    return f"{said} x {each:,} samples" if isinstance(each, int) and each > 1 else said
