# SPDX-License-Identifier: Apache-2.0
"""Raw scores of groups on the host: which groups are mixed, and what the record says of them.

It is decided here and nowhere else, from scores as the reward function gave them: what shapes them afterwards must not
make two equal answers different.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from jrl.ops.pass_rates import pass_at_k

QUARTERS = 4
"""Bins of the solve rates strictly between 0 and 1."""


class GroupScores(NamedTuple):
    """Raw scores of G prompts with K completions each.

    Attributes:
      scores: (G, K); NaN where the reward failed.
      valid: False on rows that are left out: their reward failed, or they are truncated and masked.
      lengths: Tokens of each completion.
    """

    scores: Float[np.ndarray, "G K"]
    valid: Bool[np.ndarray, "G K"]
    lengths: Int[np.ndarray, "G K"]

    @staticmethod
    def concatenate(parts: Sequence[GroupScores]) -> GroupScores:
        """The groups of all parts, in order; at least one part."""
        return GroupScores(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    @property
    def mixed(self) -> Bool[np.ndarray, "G"]:
        """True for groups of which two valid scores differ: the others teach nothing to a group's baseline.

        By largest and smallest, and not by a deviation, which of equal numbers is what rounding left over.
        """
        highest = np.where(self.valid, self.scores, -np.inf).max(axis=1)
        lowest = np.where(self.valid, self.scores, np.inf).min(axis=1)
        return np.asarray(highest > lowest)

    def figures(self) -> dict[str, float]:
        """Metrics of the groups; where all scores are 0 or 1, also of what was solved."""
        found = {
            "group/zero_std_fraction": float(np.mean(~self.mixed)),
            "group/valid_mean": float(np.mean(self.valid.sum(axis=1))),
        }
        known = self.scores[~np.isnan(self.scores)]
        if known.size and np.isin(known, (0.0, 1.0)).all():
            found |= self._solved()
        return found

    def _solved(self) -> dict[str, float]:
        """Histogram of solve rates, pass@k, and the lengths of right and of wrong completions.

        Of all completions that have a score: what an update leaves out was an attempt all the same.
        """
        right, scored = self.scores == 1, ~np.isnan(self.scores)
        count, size = right.sum(axis=1), scored.sum(axis=1)
        rates = (count / np.maximum(size, 1))[size > 0]
        found = {"group/solve_rate_0": float(np.mean(rates == 0))}
        for quarter in range(QUARTERS):
            low, high = quarter / QUARTERS, (quarter + 1) / QUARTERS
            # A rate on a boundary is of the quarter below it; 0 and 1 have bins of their own.
            inside = (rates > low) & (rates <= high) & (rates < 1)
            found[f"group/solve_rate_q{quarter + 1}"] = float(np.mean(inside))
        found["group/solve_rate_1"] = float(np.mean(rates == 1))
        whole = size == self.scores.shape[1]
        if whole.any():  # of fewer samples the estimate would be another one
            for k, table in pass_rates(self.scores.shape[1]).items():
                found[f"reward/pass_at_{k}"] = float(np.mean(table[count[whole]]))
        for name, rows in (("right", right), ("wrong", scored & ~right)):
            if rows.any():
                found[f"completion/length_{name}"] = float(np.mean(self.lengths[rows]))
        return found


@functools.cache
def pass_rates(num_samples: int) -> dict[int, Float[np.ndarray, "C"]]:
    """pass@k of a prompt by how many of its samples are right, for k = 1, 2, 4, ... and `num_samples`.

    A table, made once: an estimate made on the device would wait for all that the device has still to do.

    Args:
      num_samples: Samples of each prompt.
    """
    powers = [1 << power for power in range(num_samples.bit_length()) if 1 << power < num_samples]
    counts = jnp.arange(num_samples + 1)
    return {k: np.asarray(pass_at_k(counts, num_samples=num_samples, k=k)) for k in (*powers, num_samples)}
