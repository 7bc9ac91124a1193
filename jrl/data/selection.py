# SPDX-License-Identifier: Apache-2.0
"""Selection of the policy's own samples to learn from: the best of each prompt, by rising percentiles.

Reference: Gulcehre et al. 2023 (ReST), arXiv:2308.08998, section 3: the filter of the improve steps. The percentile is
here that of each prompt's own scores, as in trlX, so that easy prompts do not push out hard ones.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from jaxtyping import Bool, Float, Int

THRESHOLD_MARGIN = 1e-3
"""Distance that thresholds keep from the lowest and the highest of them, in units of the score."""


def rising_percentiles(start: float, end: float, num_steps: int) -> Float[np.ndarray, "I"]:
    """The percentile of each improve step: evenly from `start` to `end`, both included; of a single step, `start`.

    Example:
      >>> rising_percentiles(0.7, 0.9, 3).round(6).tolist()
      [0.7, 0.8, 0.9]
    """
    return np.linspace(start, end, num_steps)


def score_thresholds(
    scores: Float[np.ndarray, "M"],
    groups: Int[np.ndarray, "M"],
    percentiles: Float[np.ndarray, "I"],
    *,
    num_groups: int,
) -> Float[np.ndarray, "I G"]:
    """The score from which on a prompt's samples are kept, for each improve step.

    It is the quantile of the prompt's own scores (linear between two of them), then brought into
    [lowest + 1e-3, highest − 1e-3] of all prompts' thresholds; where these two cross, the upper one holds. So scores
    of a few distinct values lose the worst and keep the best.

    Args:
      scores: Finite, at least one.
      groups: Number of each sample's prompt.
      percentiles: In [0, 1].
      num_groups: Prompts.
    Returns:
      One threshold a step and prompt; NaN for a prompt without scores. Over the steps they rise as the percentiles do.
    """
    found = np.full((len(percentiles), num_groups), np.nan)
    order = np.argsort(groups, kind="stable")
    bounds = np.searchsorted(groups[order], np.arange(num_groups + 1))
    for group in np.unique(groups):
        found[:, group] = np.quantile(scores[order[bounds[group] : bounds[group + 1]]], percentiles)
    lowest = np.nanmin(found, axis=1, keepdims=True) + THRESHOLD_MARGIN
    highest = np.nanmax(found, axis=1, keepdims=True) - THRESHOLD_MARGIN
    return np.minimum(np.maximum(found, lowest), highest)


def distinct(
    groups: Int[np.ndarray, "M"], completions: Sequence[Sequence[int]], scores: Float[np.ndarray, "M"]
) -> Int[np.ndarray, "K"]:
    """Samples without the repetitions of a completion for the same prompt: of equal ones the best, then the first."""
    best: dict[tuple[int, ...], int] = {}
    for index in np.argsort(-scores, kind="stable"):
        best.setdefault((int(groups[index]), *completions[index]), int(index))
    return np.sort(np.fromiter(best.values(), np.int64, len(best)))


def best_of_each(
    groups: Int[np.ndarray, "M"], scores: Float[np.ndarray, "M"], limit: int
) -> Bool[np.ndarray, "M"]:
    """True on the `limit` best samples of each prompt; of equal scores the first."""
    order = np.lexsort((-scores, groups))
    places = np.arange(len(order)) - np.searchsorted(groups[order], groups[order])
    found = np.zeros(len(order), bool)
    found[order[places < limit]] = True
    return found


@dataclass(frozen=True)
class KeptSamples:
    """Samples that a round of sampling leaves to learn from, over all of its improve steps.

    Attributes:
      groups: Number of each sample's prompt.
      completions: Sampled ids of each.
      scores: Of each.
      num_passes: Improve steps that keep each, at least 1: they are the first ones, since thresholds only rise.
      indices: Number of each among the samples of the round.
      threshold_means: Mean threshold of the prompts, one an improve step.
      num_samples: Samples that had a score.
      num_duplicates: Those of them that repeated another one.
    """

    groups: Int[np.ndarray, "K"]
    completions: list[list[int]]
    scores: Float[np.ndarray, "K"]
    num_passes: Int[np.ndarray, "K"]
    indices: Int[np.ndarray, "K"]
    threshold_means: list[float]
    num_samples: int
    num_duplicates: int

    def at_step(self, step: int) -> Self:
        """Samples that improve step `step` (from 0 on) keeps, in the order of sampling."""
        chosen = np.flatnonzero(self.num_passes > step)
        return replace(
            self,
            groups=self.groups[chosen],
            completions=[self.completions[index] for index in chosen],
            scores=self.scores[chosen],
            num_passes=self.num_passes[chosen],
            indices=self.indices[chosen],
        )

    def to_plain(self) -> dict[str, Any]:
        """Packs the samples for JSON, compressed."""
        return {
            "groups": _pack(self.groups, np.int32),
            "lengths": _pack([len(row) for row in self.completions], np.int32),
            "tokens": _pack([token for row in self.completions for token in row], np.int32),
            "scores": _pack(self.scores, np.float64),
            "num_passes": _pack(self.num_passes, np.int32),
            "indices": _pack(self.indices, np.int64),
            "threshold_means": self.threshold_means,
            "num_samples": self.num_samples,
            "num_duplicates": self.num_duplicates,
        }

    @classmethod
    def from_plain(cls, found: Mapping[str, Any]) -> Self:
        """Restores the samples from the result of `to_plain`."""
        ends = np.cumsum(_unpack(found["lengths"], np.int32))[:-1]
        rows = np.split(_unpack(found["tokens"], np.int32), ends)
        return cls(
            groups=_unpack(found["groups"], np.int32),
            completions=[row.tolist() for row in rows],
            scores=_unpack(found["scores"], np.float64),
            num_passes=_unpack(found["num_passes"], np.int32),
            indices=_unpack(found["indices"], np.int64),
            threshold_means=list(found["threshold_means"]),
            num_samples=found["num_samples"],
            num_duplicates=found["num_duplicates"],
        )


def select(
    groups: Int[np.ndarray, "N"],
    completions: Sequence[Sequence[int]],
    scores: Float[np.ndarray, "N"],
    percentiles: Float[np.ndarray, "I"],
    *,
    num_groups: int,
    max_samples_per_prompt: int | None,
) -> KeptSamples | None:
    """The samples worth learning from.

    Thresholds count every sample that has a score, repetitions included: a completion that the policy writes often
    weighs as much in the percentile. Then repetitions go, then all but the best `max_samples_per_prompt`, then what
    lies below its prompt's threshold.

    Args:
      groups: Number of each sample's prompt, in [0, num_groups).
      completions: Sampled ids of each.
      scores: Of each; NaN leaves a sample out of everything.
      percentiles: Of the improve steps, not falling.
      num_groups: Prompts.
      max_samples_per_prompt: None: no limit.
    Returns:
      What any improve step keeps; None if no sample has a score. Otherwise every step keeps at least one: the best of
      the prompt whose threshold is the highest.
    """
    scored = np.flatnonzero(~np.isnan(scores))
    if not len(scored):
        return None
    thresholds = score_thresholds(scores[scored], groups[scored], percentiles, num_groups=num_groups)
    rows = [completions[int(index)] for index in scored]
    unique = scored[distinct(groups[scored], rows, scores[scored])]
    candidates = unique
    if max_samples_per_prompt is not None:
        candidates = unique[best_of_each(groups[unique], scores[unique], max_samples_per_prompt)]
    num_passes = np.sum(scores[candidates] >= thresholds[:, groups[candidates]], axis=0)
    chosen, num_passes = candidates[num_passes > 0], num_passes[num_passes > 0]
    return KeptSamples(
        groups=groups[chosen],
        completions=[list(completions[int(index)]) for index in chosen],
        scores=scores[chosen],
        num_passes=num_passes,
        indices=chosen,
        threshold_means=np.nanmean(thresholds, axis=1).tolist(),
        num_samples=len(scored),
        num_duplicates=len(scored) - len(unique),
    )


def _pack(values: Any, dtype: type[np.generic]) -> str:
    return base64.b64encode(zlib.compress(np.asarray(values, dtype).tobytes())).decode("ascii")


def _unpack(text: str, dtype: type[np.generic]) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype)
