# SPDX-License-Identifier: Apache-2.0
"""Recorded episodes of the maze: mostly random moves, a few optimal ones, mean return -83 as in LMRL-Gym's data."""

from __future__ import annotations

import functools

import numpy as np

from ..worlds.task import Turn
from .maze import CELLS, MOVES, STARTS, Maze, Position
from .optimum import optimal_policy

OPTIMAL_SHARE = 1 / 60
"""Probability that a move is the optimal one on purpose; others are uniform over the four. The exact mean return is
-83.00 (`optimum.mean_return(optimum.mixture_policy(OPTIMAL_SHARE))`)."""


def episode(maze: Maze, seed: int, index: int, *, optimal_share: float = OPTIMAL_SHARE) -> list[Turn]:
    """Episode number `index` of a data set: a pure function of its arguments.

    Args:
      maze: Its observations are recorded; moves are the same whatever it shows.
      seed: Of the data set.
      index: Of the episode, from 0.
      optimal_share: Probability of an optimal move; 0 is the random player, 1 the best.
    Returns:
      Turns up to the goal (last reward 0), or `max_moves` + 1 of them.
    """
    random = np.random.RandomState([seed, index])  # its stream is fixed for good
    actions = tuple(MOVES)
    state, observation = maze.reset(STARTS[random.randint(len(STARTS))])
    turns, done = list[Turn](), False
    while not done:
        is_optimal, drawn = random.random_sample() < optimal_share, actions[random.randint(len(actions))]
        action = f"{_optimal_moves()[state.position] if is_optimal else drawn}\n"
        state, answer, reward, done = maze.step(state, action)
        turns.append(Turn(observation, action, reward))
        observation = answer
    return turns


@functools.cache
def _optimal_moves() -> dict[Position, str]:
    return {cell: tuple(MOVES)[i] for cell, i in zip(CELLS, optimal_policy().argmax(axis=1), strict=True)}
