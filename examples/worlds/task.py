# SPDX-License-Identifier: Apache-2.0
"""A world of several turns in text, and what a learner needs beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from transformers import PreTrainedTokenizerFast


class Turn(NamedTuple):
    """An observation, the action that it was answered by, with its line break, and that action's reward."""

    observation: str
    action: str
    reward: float


class World(Protocol):
    """A world as a pure function of states, which are its own."""

    def reset(self, start: Any) -> tuple[Any, str]:
        """First state and observation of an episode."""
        ...

    def step(self, state: Any, text: str) -> tuple[Any, str, float, bool]:
        """Next state, observation, reward, and whether the episode is over."""
        ...


@dataclass(frozen=True, kw_only=True)
class Task:
    """A world to be learned.

    Attributes:
      labels: Names the world in a line of results.
      world: It is played.
      starts: An evaluation plays an episode from each.
      record: Number → a recorded episode as `jrl` reads it.
      tokenizer: Of its texts.
      context_turns: Turns before the one at hand that an offline player remembers; None: all.
      row_tokens: Tokens of the longest row of such a player.
    """

    labels: Mapping[str, str]
    world: World
    starts: Sequence[Any]
    record: Callable[[int], dict[str, Any]]
    tokenizer: Callable[[], PreTrainedTokenizerFast]
    context_turns: int | None
    row_tokens: int


class Algorithm(NamedTuple):
    """A way to learn a task.

    Attributes:
      recipe: File of `configs/`, without its ending.
      changes: Sections that replace parts of the recipe.
      clone: Recipe and changes of the stage before, which clones recorded episodes; None: weights are random.
    """

    recipe: str
    changes: Mapping[str, Any]
    clone: tuple[str, Mapping[str, Any]] | None = None


def record(turns: Sequence[Turn], *, done: bool, last: str) -> dict[str, Any]:
    """A recorded episode in jrl's form, in which an observation is the answer to the turn before it.

    Args:
      turns: Of the episode.
      done: Whether the world ended it. Where a limit did, what answers its last action is not known, so that action
        is left out.
      last: What the world answered at its end.
    """
    answers = [turn.observation for turn in turns[1:]] + [last] * done
    return {
        "prompt": turns[0].observation,
        "turns": [
            {"output": turn.action, "reward": turn.reward, "observation": answer}
            for turn, answer in zip(turns, answers, strict=False)
        ],
        "done": done,
    }
