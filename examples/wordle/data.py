# SPDX-License-Identifier: Apache-2.0
"""Recorded games of Wordle: each guess is optimal or a random word of the list."""

from __future__ import annotations

import numpy as np

from ..worlds.task import Turn
from .optimum import search
from .wordle import Wordle, spell

OPTIMAL_SHARE = 0.3
"""Probability that a guess is the optimal one for all that is known; others are uniform over the list."""


def episode(game: Wordle, seed: int, index: int, *, optimal_share: float = OPTIMAL_SHARE) -> list[Turn]:
    """Game number `index` of a data set: a pure function of its arguments.

    Args:
      game: The list and the number of guesses.
      seed: Of the data set.
      index: Of the game, from 0.
      optimal_share: Probability of an optimal guess; 0 is the random player, 1 the best.
    Returns:
      Turns up to the right guess (last reward 0), or `max_guesses` of them.
    """
    random = np.random.RandomState([seed, index])  # its stream is fixed for good
    words = game.words
    state, observation = game.reset(words[random.randint(len(words))])
    turns, history, done = list[Turn](), list[tuple[str, str]](), False
    while not done:
        is_optimal, guess = random.random_sample() < optimal_share, words[random.randint(len(words))]
        if is_optimal:
            found = search(words)
            guess = words[found.best(found.candidates(history), game.max_guesses - state.guesses)[1]]
        action = f"{spell(guess)}\n"
        state, answer, reward, done = game.step(state, action)
        turns.append(Turn(observation, action, reward))
        history.append((guess, "".join(answer.split())))
        observation = answer
    return turns
