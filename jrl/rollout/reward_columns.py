# SPDX-License-Identifier: Apache-2.0
"""Scores of several reward functions: one column each, and their weighted sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from jrl.rollout.rewards import Reward


class RewardColumns(NamedTuple):
    """Scores of each reward function, before any weight.

    Attributes:
      names: Of the functions.
      scores: NaN where a function failed on a row or does not apply to it.
      not_applicable: True where a function answered None.
    """

    names: tuple[str, ...]
    scores: Float[np.ndarray, "N F"]
    not_applicable: Bool[np.ndarray, "N F"]

    @staticmethod
    def concatenate(parts: Sequence[RewardColumns]) -> RewardColumns:
        """The rows of all parts, in order; at least one part, and the same functions in all."""
        return RewardColumns(
            parts[0].names,
            np.concatenate([part.scores for part in parts]),
            np.concatenate([part.not_applicable for part in parts]),
        )

    @property
    def several(self) -> bool:
        """False for one function, whose scores are the rewards themselves."""
        return len(self.names) > 1

    def metrics(self) -> dict[str, float]:
        """`reward/<name>/mean`, `/std` and `/not_applicable` of each of several functions; nothing for one.

        Mean and deviation are over the rows that a function spoke of; without any there is neither.
        """
        found: dict[str, float] = {}
        for name, scores, silent in zip(self.names, self.scores.T, self.not_applicable.T, strict=True):
            known = scores[~np.isnan(scores)]
            if len(known):
                found[f"reward/{name}/mean"], found[f"reward/{name}/std"] = mean_and_std(known)
            found[f"reward/{name}/not_applicable"] = float(silent.sum())
        return found if self.several else {}

    def cells(self) -> dict[str, list[float | None]]:
        """Columns of a samples' log, None where a function has no score; nothing for one function."""
        if not self.several:
            return {}
        return {
            f"reward/{name}": known_or_none(scores)
            for name, scores in zip(self.names, self.scores.T, strict=True)
        }


def known_or_none(scores: Float[np.ndarray, "N"]) -> list[float | None]:
    """The scores as JSON has them: None in the place of NaN."""
    return [None if math.isnan(score) else float(score) for score in scores]


def mean_and_std(scores: Float[np.ndarray, "N"]) -> tuple[float, float]:
    """Mean and deviation (ddof 1) of the scores of a log line; NaN and 0 of none, and of one its value and 0.

    Args:
      scores: Those that are known, without NaN.

    Example:
      >>> mean_and_std(np.array([1.0, 3.0]))
      (2.0, 1.4142135623730951)
    """
    if not len(scores):
        return math.nan, 0.0
    return float(scores.mean()), float(scores.std(ddof=1)) if len(scores) > 1 else 0.0


def prompt_means(scores: Float[np.ndarray, "N"], prompts: Sequence[str]) -> Float[np.ndarray, "P"]:
    """Mean score of each different prompt, in the order in which they first appear.

    Args:
      scores: One a sample; NaN is in no mean.
      prompts: Likewise.
    Returns:
      NaN for a prompt none of whose scores is known.

    Example:
      >>> prompt_means(np.array([1.0, 5.0, 2.0]), ["b", "a", "b"])
      array([1.5, 5. ])
    """
    samples: dict[str, list[float]] = {prompt: [] for prompt in prompts}
    for prompt, score in zip(prompts, scores, strict=True):
        if not math.isnan(score):
            samples[prompt].append(float(score))
    return np.array([mean_and_std(np.array(known))[0] for known in samples.values()])


def standard_error(means: Float[np.ndarray, "P"]) -> float | None:
    """Standard error of a mean over prompts: deviation (ddof 1) of the prompts' means over the root of their number.

    Samples of one prompt are alike, so they are averaged first (`prompt_means`).

    Args:
      means: One a prompt; NaN is left out.
    Returns:
      None of fewer than two, which have no deviation.

    Example:
      >>> standard_error(np.array([1.0, 3.0]))
      1.0
    """
    known = means[~np.isnan(means)]
    return mean_and_std(known)[1] / math.sqrt(len(known)) if len(known) > 1 else None


def reward_columns(names: Sequence[str], rewards: Sequence[Sequence[Reward]]) -> RewardColumns:
    """The rewards of functions as columns; of rewards per token, their sums.

    Args:
      names: Of the functions.
      rewards: From `call_reward_fns`.
    """
    silent = [[reward is None for reward in column] for column in rewards]
    totals = [
        [math.nan if reward is None else math.fsum(np.atleast_1d(reward)) for reward in column]
        for column in rewards
    ]
    return RewardColumns(tuple(names), np.asarray(totals, np.float64).T, np.asarray(silent, bool).T)


def combined_rewards(
    rewards: Sequence[Sequence[Reward]], weights: Sequence[float]
) -> list[float | np.ndarray]:
    """Weighted sum over the functions that speak of a row, in float64; NaN where none does.

    A function that failed on a row or does not apply to it is left out of its sum; the weights of the others stay.
    Where one speaks of every token, the numbers of the others are those of the last token.

    Args:
      rewards: From `call_reward_fns`.
      weights: One a function.
    """
    if len(rewards) == 1:
        (weight,) = weights
        return [math.nan if reward is None else _weighed(weight, reward) for reward in rewards[0]]
    return [_weighted_sum(given, weights) for given in zip(*rewards, strict=True)]


def _weighted_sum(given: Sequence[Reward], weights: Sequence[float]) -> float | np.ndarray:
    """Sum of what functions say of one row."""
    known = [
        weight * np.asarray(reward, np.float64)
        for weight, reward in zip(weights, given, strict=True)
        if reward is not None and not np.isnan(reward).any()
    ]
    by_token = [reward for reward in known if reward.ndim]
    if not by_token:
        return math.fsum(known) if known else math.nan
    found = np.sum(by_token, axis=0)
    found[-1] += math.fsum(reward for reward in known if not reward.ndim)
    return found.astype(np.float32)


def check_weights(weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
    """The weights of so many reward functions: 1 each by default.

    Raises:
      ValueError: If there are as many weights as functions.
    """
    if weights is None:
        return (1.0,) * count
    if len(weights) != count:
        raise ValueError(
            f"`method.reward_weights` must have one entry a reward function, {count}, got {len(weights)}: "
            f"{list(weights)}."
        )
    return tuple(float(weight) for weight in weights)


def _weighed(weight: float, reward: float | np.ndarray) -> float | np.ndarray:
    return reward if weight == 1 else weight * reward
