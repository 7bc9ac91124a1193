# SPDX-License-Identifier: Apache-2.0
"""Plays a world with a trained policy: an episode from each start, all of them a turn at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .task import Turn, World

Answer = Callable[[Sequence[str]], list[str]]
"""Actions for so many contexts, in their order."""


def play(world: World, starts: Sequence[Any], answer: Answer, *, context_turns: int | None) -> np.ndarray:
    """Returns of one episode from each start.

    Args:
      world: It is played.
      starts: One an episode.
      answer: Asked at every turn about all episodes, about those that are over once more, so that its batch keeps its
        shape.
      context_turns: Turns before the observation that an answer is given to, as in training; None: all.
    Returns:
      Sum of the rewards of each episode, without discount.
    """
    begun = [world.reset(start) for start in starts]
    states, seen = [state for state, _ in begun], [observation for _, observation in begun]
    turns: list[list[Turn]] = [[] for _ in starts]
    going, contexts = set(range(len(starts))), list(seen)
    while going:
        answers = answer(contexts)
        for i in sorted(going):
            action = answers[i].removesuffix("\n") + "\n"
            states[i], observation, reward, done = world.step(states[i], action)
            turns[i].append(Turn(seen[i], action, reward))
            seen[i] = observation
            if done:
                going.remove(i)
            else:
                contexts[i] = context(turns[i], observation, context_turns)
    return np.array([sum(turn.reward for turn in episode) for episode in turns])


def context(turns: Sequence[Turn], observation: str, context_turns: int | None) -> str:
    """What a player reads who remembers so many turns."""
    count = len(turns) if context_turns is None else min(context_turns, len(turns))
    remembered = turns[len(turns) - count :]
    return "".join(turn.observation + turn.action for turn in remembered) + observation


def remembered(answer: Answer) -> Answer:
    """An answer that never changes is asked for once: of a greedy policy, each context has one."""
    known: dict[str, str] = {}

    def look_up(contexts: Sequence[str]) -> list[str]:
        if not all(text in known for text in contexts):
            known.update(zip(contexts, answer(contexts), strict=True))
        return [known[text] for text in contexts]

    return look_up
