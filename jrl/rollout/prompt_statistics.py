# SPDX-License-Identifier: Apache-2.0
"""Advantages of samples that get one reward each: against all others, or against those of the same prompt.

Host arithmetic in float64, float32 out: a few hundred numbers an epoch. None of these clips anything.

Reference: Black et al. 2023, arXiv:2305.13301, section 4.3 and appendix; groups: Xue et al. 2025 (DanceGRPO),
arXiv:2505.07818, and Liu et al. 2025 (Flow-GRPO), arXiv:2505.05470.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jrl.ops.z_scores import z_scores

GLOBAL_EPSILON = 1e-8
PROMPT_EPSILON = 1e-6

Rewards = Sequence[int | float] | np.ndarray
"""One a sample, or one a kept sample."""
PromptRewards = dict[str, list[float]]
"""The latest rewards of each prompt, oldest first, by `prompt_key`: plain JSON, to be kept across epochs."""


class PromptAdvantages(NamedTuple):
    """Advantages from the statistics of prompts, with the state to keep.

    Attributes:
      state: With this epoch's rewards.
      advantages: (N,) float32.
      num_tracked: Prompts of this epoch whose own statistics were used.
      num_prompts: Prompts of this epoch.
    """

    state: PromptRewards
    advantages: np.ndarray
    num_tracked: int
    num_prompts: int


class PromptStats(NamedTuple):
    """Statistics of the rewards kept of a prompt.

    Attributes:
      mean: Their mean.
      std: Their deviation, as a population.
      size: How many there are.
    """

    mean: float
    std: float
    size: int


def prompt_key(tokens: Sequence[int] | np.ndarray) -> str:
    """Name of a prompt: its token ids, padding included, so that every process calls it alike.

    Args:
      tokens: Ids.
    Reference: none; a dictionary's key.
    Example:
      >>> prompt_key([5, 6])
      '5 6'
    """
    return " ".join(str(int(token)) for token in tokens)


def global_advantages(rewards: Rewards) -> np.ndarray:
    """A = (r − mean)/(std + 1e-8) over all samples of the epoch, (N,) float32; the deviation is the population's.

    Args:
      rewards: Of each sample.
    Reference: Black et al. 2023, arXiv:2305.13301, section 4.3.
    Example:
      >>> [round(float(advantage), 4) for advantage in global_advantages([1, 2, 3])]
      [-1.2247, 0.0, 1.2247]
    """
    values = _as_rewards(rewards)
    return z_scores(values, mean=values.mean(), std=values.std(), epsilon=GLOBAL_EPSILON).astype(np.float32)


def prompt_advantages(
    state: Mapping[str, Rewards],
    keys: Sequence[str],
    rewards: Rewards,
    *,
    buffer_size: int,
    min_count: int,
) -> PromptAdvantages:
    """A = (r − mean)/(std + 1e-6) over the latest rewards of the same prompt, this epoch's included.

    Args:
      state: Rewards kept so far; {} at first. It is not changed.
      keys: Prompt of each sample, from `prompt_key`.
      rewards: Of each sample.
      buffer_size: Rewards kept of a prompt.
      min_count: A prompt of which fewer are kept is judged by all samples of this epoch.
    Raises:
      ValueError: If there is not one reward for each key.
    Reference: Black et al. 2023, arXiv:2305.13301, section 4.3 and appendix.
    Example:
      >>> found = prompt_advantages({"a": [1.0]}, ["a"], [3.0], buffer_size=16, min_count=2)  # mean 2, deviation 1
      >>> found.advantages.round(4).tolist(), found.state
      ([1.0], {'a': [1.0, 3.0]})
    """
    values = _as_rewards(rewards)
    if len(keys) != len(values):
        raise ValueError(
            f"`rewards` must hold one number for each of {len(keys)} samples, got {len(values)}."
        )
    kept = {key: list(latest) for key, latest in state.items()}
    names = np.asarray(keys)
    advantages = np.zeros(len(values))
    distinct = list(dict.fromkeys(keys))
    num_tracked = 0
    for key in distinct:
        rows = names == key
        kept[key] = [*kept.get(key, []), *values[rows].tolist()][-buffer_size:]
        is_tracked = len(kept[key]) >= min_count
        num_tracked += is_tracked
        among = np.asarray(kept[key]) if is_tracked else values
        advantages[rows] = z_scores(values[rows], mean=among.mean(), std=among.std(), epsilon=PROMPT_EPSILON)
    return PromptAdvantages(kept, advantages.astype(np.float32), num_tracked, len(distinct))


def group_advantages(
    rewards: Rewards,
    groups: Sequence[int] | np.ndarray,
    *,
    std: str = "group",
) -> np.ndarray:
    """A = (r − mean of its group)/(std + 1e-6), (N,) float32; 0 in a group whose rewards are all the same.

    Args:
      rewards: Of each sample.
      groups: Number of each sample's group: the samples drawn of one prompt.
      std: "group": the deviation within the group; "global": that of all samples of the epoch.
    Raises:
      ValueError: On another word, or if there is not one group for each reward.
    Reference: Shao et al. 2024, arXiv:2402.03300, section 4.1.2; of images: Xue et al. 2025, arXiv:2505.07818,
    and Liu et al. 2025, arXiv:2505.05470.
    Example:
      >>> group_advantages([1.0, 3.0, 5.0, 5.0], [0, 0, 1, 1]).round(4).tolist()
      [-1.0, 1.0, 0.0, 0.0]
    """
    values, numbers = _as_rewards(rewards), np.asarray(groups)
    if std not in ("group", "global"):
        raise ValueError(f"`std` must be 'group' or 'global', got {std!r}.")
    if numbers.shape != values.shape:
        raise ValueError(
            f"`groups` must hold one number for each of {len(values)} samples, got {numbers.shape}."
        )
    advantages = np.zeros(len(values))
    for group in np.unique(numbers):
        rows = numbers == group
        if np.ptp(values[rows]):
            deviation = values[rows].std() if std == "group" else values.std()
            advantages[rows] = z_scores(
                values[rows], mean=values[rows].mean(), std=deviation, epsilon=PROMPT_EPSILON
            )
    return advantages.astype(np.float32)


def prompt_stats(state: Mapping[str, Rewards]) -> dict[str, PromptStats]:
    """Mean, deviation and number of the rewards kept of each prompt.

    Args:
      state: Rewards kept so far, by prompt.
    Reference: none; mean and population deviation.
    Example:
      >>> prompt_stats({"a": [1.0, 3.0]})
      {'a': PromptStats(mean=2.0, std=1.0, size=2)}
    """
    return {
        key: PromptStats(float(np.mean(kept)), float(np.std(kept)), len(kept)) for key, kept in state.items()
    }


def _as_rewards(rewards: Rewards) -> np.ndarray:
    """Rewards as float64, so that integers do not truncate what is computed of them."""
    return np.asarray(rewards, np.float64)
