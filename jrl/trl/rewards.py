# SPDX-License-Identifier: Apache-2.0
"""TRL's reward functions, over `jrl.rewards`: completions are texts, or lists of messages of which the first counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jrl import rewards

__all__ = [
    "accuracy_reward",
    "get_soft_overlong_punishment",
    "reasoning_accuracy_reward",
    "think_format_reward",
]


def think_format_reward(completions: Sequence[Any], **columns: Any) -> list[float]:
    """1 where a completion is `<think>...</think>...` with one opening tag; 0 elsewhere. `columns` are not read."""
    del columns
    return rewards.think_format_reward(_texts(completions))


def accuracy_reward(completions: Sequence[Any], solution: Sequence[str], **columns: Any) -> list[float]:
    """1 where the last marked answer of a completion is the solution (`docs/verifiers.md`); 0 elsewhere.

    Args:
      completions: Texts or messages.
      solution: Known answers.
      **columns: Other columns; not read.
    """
    del columns
    return rewards.accuracy_reward(_texts(completions), solution)


def reasoning_accuracy_reward(
    completions: Sequence[Any],
    solution: Sequence[str],
    reasoning_delimiters: Sequence[str] | None = None,
    **columns: Any,
) -> list[float]:
    """Accuracy of the answer that follows the reasoning; 0 where the reasoning never ends.

    Args:
      completions: Texts or messages.
      solution: Known answers.
      reasoning_delimiters: Ends of the reasoning; default: `</think>`.
      **columns: Other columns; not read.
    """
    del columns
    ends = reasoning_delimiters or ["</think>"]
    answers = []
    for text in _texts(completions):
        cut = max((text.rfind(end) + len(end) for end in ends if end in text), default=len(text))
        answers.append(text[cut:])
    return rewards.accuracy_reward(answers, solution)


def get_soft_overlong_punishment(
    max_completion_len: int, soft_punish_cache: int
) -> Callable[..., list[float]]:
    """A reward that falls along a line from 0 to −1 over the last tokens that a completion may have.

    Args:
      max_completion_len: Beyond it a completion gets −1.
      soft_punish_cache: Tokens before it over which the reward falls.
    Returns:
      completion ids → rewards in [−1, 0]; other columns are not read.
    Reference: DAPO, arXiv:2503.14476, eq. 13.
    """
    free = max_completion_len - soft_punish_cache

    def punishment(completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        del columns
        return [_punished(len(ids), free, soft_punish_cache) for ids in completion_ids]

    return punishment


def _punished(length: int, free: int, cache: int) -> float:
    if length <= free:
        return 0.0
    return -1.0 if length > free + cache else (free - length) / cache


def _texts(completions: Sequence[Any]) -> list[str]:
    return [one if isinstance(one, str) else one[0]["content"] for one in completions]
