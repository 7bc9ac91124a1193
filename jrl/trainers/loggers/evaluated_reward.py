# SPDX-License-Identifier: Apache-2.0
"""The mean reward of an evaluation with its standard error, and whether two of them differ by more than that."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl.rollout.reward_columns import standard_error
from jrl.trainers.loggers.jsonl import SAMPLING

MEAN, ERROR = "reward/mean", "reward/standard_error"
"""Names of both figures in a record."""
PROMPT_MEANS = f"{SAMPLING}reward_means"
"""Name of the mean rewards of single prompts."""
FEWEST_PAIRS = 8
"""Prompts that a comparison prompt by prompt needs: the deviation of fewer differences is a guess."""


class EvaluatedReward(NamedTuple):
    """Mean reward of the samples of one record.

    Attributes:
      step: Optimizer steps before it.
      mean: Of the samples.
      error: Standard error of the mean; None: not known, as of a single sample and of older runs.
      samples: Of what there were how many, in words; "": not known.
      prompt_means: Mean reward of each prompt, in the evaluation's order, None where none is known; empty: not logged.
    """

    step: int
    mean: float
    error: float | None = None
    samples: str = ""
    prompt_means: Sequence[float | None] = ()

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
        return cls(int(record["step"]), mean, error, _samples(record), record.get(PROMPT_MEANS) or ())

    @property
    def figure(self) -> str:
        """Such as "0.594 +- 0.03"; without an error, the mean alone."""
        return f"{self.mean:.3g}" if self.error is None else f"{self.mean:.3g} +- {self.error:.2g}"

    def __str__(self) -> str:
        """Such as "0.594 +- 0.03 (64 prompts)"."""
        return f"{self.figure} ({self.samples})" if self.samples else self.figure

    def change_from(self, other: EvaluatedReward) -> tuple[float, float] | None:
        """Change of the mean since another evaluation, and the standard error of that change.

        Both evaluations see the same prompts, so their differences are taken prompt by prompt (a paired comparison):
        that some prompts are harder than others is then no noise. Without `FEWEST_PAIRS` of them both errors count as
        independent, which is too wide.

        Args:
          other: The earlier evaluation.
        Returns:
          None where an error is not known, or where independent ones are 0 and so tell nothing.
        """
        if self.error is None or other.error is None:
            return None
        if len(self.prompt_means) == len(other.prompt_means):
            pairs = zip(self.prompt_means, other.prompt_means, strict=True)
            changes = np.array([one - two for one, two in pairs if one is not None and two is not None])
            error = standard_error(changes)
            if error is not None and len(changes) >= FEWEST_PAIRS:
                return float(changes.mean()), error
        independent = math.hypot(self.error, other.error)
        return (self.mean - other.mean, independent) if independent else None

    def is_within_error(self, other: EvaluatedReward) -> bool:
        """True where two means differ, by no more than the error of their difference; False where none is known."""
        change = self.change_from(other)
        return change is not None and 0 < abs(change[0]) <= change[1]


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _samples(record: Mapping[str, Any]) -> str:
    """Such as "64 prompts", or "2 prompts x 32 samples"."""
    prompts, each = (record.get(f"{SAMPLING}{name}") for name in ("num_prompts", "samples_per_prompt"))
    if not isinstance(prompts, int):
        return ""
    said = f"{prompts:,} prompt{'s' if prompts > 1 else ''}"
    return f"{said} x {each:,} samples" if isinstance(each, int) and each > 1 else said
