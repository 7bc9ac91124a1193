# SPDX-License-Identifier: Apache-2.0
"""A maze of 10 × 13 squares in text: an observation is a sentence about walls, an action is "move up" or the like.

Layout, goal, sentences, rewards and the limit of steps are facts of LMRL-Gym's double-T maze; the code is our own.

Source: Abdulhai et al. 2023, "LMRL Gym", arXiv:2311.18232; https://github.com/abdulhaim/LMRL-Gym, commit 911d726,
llm_rl_scripts/maze/env/mazes.py and env.py.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

Position = tuple[int, int]
"""Row and column, from 0 at the top left, the outer walls counted."""

LAYOUT = (
    "#############",
    "#.....#.....#",
    "###.#####.###",
    "###.#####.###",
    "###.#####.###",
    "###.......###",
    "######.######",
    "######.######",
    "######.######",
    "#############",
)
GOAL: Position = (8, 6)
MOVES: Mapping[str, Position] = {
    "move left": (0, -1),
    "move right": (0, 1),
    "move up": (-1, 0),
    "move down": (1, 0),
}
"""What each action adds to the position. Order is that of columns in `optimum`."""

CELLS: tuple[Position, ...] = tuple(
    (row, column) for row, line in enumerate(LAYOUT) for column, square in enumerate(line) if square == "."
)
STARTS: tuple[Position, ...] = tuple(cell for cell in CELLS if cell != GOAL)
SUCCESS, FAILURE = "Success\n", "Failure\n"
_SIDES = {"to your right": (0, 1), "to your left": (0, -1), "above you": (-1, 0), "below you": (1, 0)}


class State(NamedTuple):
    """Where an episode stands.

    Attributes:
      position: Of the player.
      actions: How many have been answered.
    """

    position: Position
    actions: int


class Step(NamedTuple):
    """The answer to an action.

    Attributes:
      state: The one after it.
      observation: What the player reads next, with a line break at its end.
      reward: 0 on arrival at the goal, -4 where the text is no action, else -1.
      done: Whether the episode is over.
    """

    state: State
    observation: str
    reward: float
    done: bool


@dataclass(frozen=True)
class Maze:
    """The maze as a pure function of states: `reset` gives one, `step` the next.

    A move into a wall leaves the player in place and costs what a move costs. As in LMRL-Gym the player makes
    `max_moves` moves, and whatever comes after the last is answered by `FAILURE` at a price of 1: a failed episode
    of legal moves returns -(max_moves + 1).

    Attributes:
      shows_position: Observations name goal and position (fully observed); without, they name the walls alone
        (partly observed).
      max_moves: Moves of an episode.
    Example:
      >>> maze = Maze(shows_position=False)
      >>> state, observation = maze.reset((7, 6))
      >>> print(observation, end="")
      There are walls to your right, to your left.
      >>> maze.step(state, "move down\\n")
      Step(state=State(position=(8, 6), actions=1), observation='Success\\n', reward=0.0, done=True)
    """

    shows_position: bool = True
    max_moves: int = 100

    def reset(self, start: Position) -> tuple[State, str]:
        """First state and observation of an episode.

        Args:
          start: One of `STARTS`; `draw_start` draws it.
        Raises:
          ValueError: If it is a wall, the goal or outside.
        """
        if start not in STARTS:
            raise ValueError(f"`start` must be an open square other than the goal, got {start}")
        return State(start, 0), describe(start, shows_position=self.shows_position)

    def step(self, state: State, text: str) -> Step:
        """Answers an action.

        Args:
          state: Of `reset` or of the step before.
          text: A key of `MOVES`; one line break at its end may be missing. Anything else is no action.
        Raises:
          ValueError: If the episode is over.
        """
        if state.position == GOAL or state.actions > self.max_moves:
            raise ValueError(f"the episode is over after {state.actions} actions")
        if state.actions == self.max_moves:
            return Step(State(state.position, state.actions + 1), FAILURE, -1.0, True)
        action = text.removesuffix("\n")
        if action not in MOVES:
            observation = describe(state.position, shows_position=self.shows_position)
            return Step(State(state.position, state.actions + 1), observation, -4.0, False)
        position = move(state.position, action)
        if position == GOAL:
            return Step(State(position, state.actions + 1), SUCCESS, 0.0, True)
        observation = describe(position, shows_position=self.shows_position)
        return Step(State(position, state.actions + 1), observation, -1.0, False)


def move(position: Position, action: str) -> Position:
    """Position after an action of `MOVES`: the same one where a wall is in the way."""
    rows, columns = MOVES[action]
    there = (position[0] + rows, position[1] + columns)
    return there if LAYOUT[there[0]][there[1]] == "." else position


def walls(position: Position) -> tuple[str, ...]:
    """Sides of a square that are walls, in the order of sentences: right, left, above, below."""
    return tuple(
        side
        for side, (rows, columns) in _SIDES.items()
        if LAYOUT[position[0] + rows][position[1] + columns] == "#"
    )


@functools.cache
def describe(position: Position, *, shows_position: bool) -> str:
    """The observation at a square. Digits of a number stand apart: column 11 is "1 1"."""
    sides = walls(position)
    sentence = f"There {'is a wall' if len(sides) == 1 else 'are walls'} {', '.join(sides)}.\n"
    if not shows_position:
        return sentence
    return (
        f"The goal is at position {_spell(GOAL)}. "
        f"Your current position is at position {_spell(position)}. {sentence}"
    )


def draw_start(seed: int, index: int) -> Position:
    """Start of an episode, uniform over `STARTS`: a pure function of its seed and its number."""
    # The legacy generator's stream is fixed for good.
    return STARTS[np.random.RandomState([seed, index]).randint(len(STARTS))]


def _spell(position: Position) -> str:
    return ", ".join(" ".join(str(number)) for number in position)
