# SPDX-License-Identifier: Apache-2.0
"""Wordle in text: six guesses at a hidden word of five letters, answered letter by letter.

Letters stand apart, so that a tokenizer of characters or of words sees each of them: "c r a n e" is answered by
"b y g b b". The shape of the task (200 words, texts, rewards) is LMRL-Gym's; words and code are our own.
Two letters that are the same are answered as in the game itself, each letter of the hidden word once; LMRL-Gym marks
both as present.

Source: Abdulhai et al. 2023, "LMRL Gym", arXiv:2311.18232; https://github.com/abdulhaim/LMRL-Gym, commit 911d726,
llm_rl_scripts/wordle/env/game.py and env.py.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

LENGTH = 5  # letters of a word
WORDS: tuple[str, ...] = tuple((Path(__file__).parent / "words.txt").read_text(encoding="utf-8").splitlines())
"""200 everyday words, sorted: each may be hidden, and nothing else is a guess."""

PROMPT = "Wordle:\n"


class State(NamedTuple):
    """Where a game stands.

    Attributes:
      answer: The hidden word.
      guesses: How many have been answered.
      solved: Whether the last one was right.
    """

    answer: str
    guesses: int
    solved: bool


class Step(NamedTuple):
    """The answer to a guess.

    Attributes:
      state: The one after it.
      observation: A letter of g, y or b for each letter of the guess; an empty line where it is no word of the list.
      reward: 0 where the guess is right, else -1.
      done: Whether the game is over.
    """

    state: State
    observation: str
    reward: float
    done: bool


@dataclass(frozen=True)
class Wordle:
    """The game as a pure function of states: `reset` gives one, `step` the next.

    A text that is no word of the list costs a guess and a reward of -1 and tells nothing, as in LMRL-Gym.

    Attributes:
      words: Those that may be hidden and guessed.
      max_guesses: Guesses of a game.
    Example:
      >>> game = Wordle()
      >>> state, observation = game.reset("ready")
      >>> game.step(state, "e a r t h\\n")
      Step(state=State(answer='ready', guesses=1, solved=False), observation='y y y b b\\n', reward=-1.0, done=False)
    """

    words: tuple[str, ...] = WORDS
    max_guesses: int = 6

    def reset(self, answer: str) -> tuple[State, str]:
        """First state and observation of a game.

        Args:
          answer: One of `words`; `draw_answer` draws it.
        Raises:
          ValueError: If it is no word of the list.
        """
        if answer not in self.words:
            raise ValueError(f"`answer` must be one of the {len(self.words)} words, got {answer!r}")
        return State(answer, 0, False), PROMPT

    def step(self, state: State, text: str) -> Step:
        """Answers a guess.

        Args:
          state: Of `reset` or of the step before.
          text: The guess; white space between, before and behind its letters is not read.
        Raises:
          ValueError: If the game is over.
        """
        if state.solved or state.guesses >= self.max_guesses:
            raise ValueError(f"the game is over after {state.guesses} guesses")
        guess = "".join(text.split())
        guesses, solved = state.guesses + 1, guess == state.answer
        observation = f"{spell(feedback(guess, state.answer))}\n" if guess in self.words else "\n"
        done = solved or guesses == self.max_guesses
        return Step(State(state.answer, guesses, solved), observation, 0.0 if solved else -1.0, done)


@functools.cache
def feedback(guess: str, answer: str) -> str:
    """A letter for each letter of the guess: g in its place, y elsewhere in the answer, b not in it.

    Each letter of the answer speaks for one of the guess: those in their place first, then from the left.

    Example:
      >>> feedback("sassy", "glass")
      'yybgb'
      >>> feedback("geese", "eerie")
      'bgybg'
    """
    missed = Counter(there for here, there in zip(guess, answer, strict=True) if here != there)
    marks = []
    for here, there in zip(guess, answer, strict=True):
        if here == there:
            marks.append("g")
        elif missed[here] > 0:
            missed[here] -= 1
            marks.append("y")
        else:
            marks.append("b")
    return "".join(marks)


def spell(word: str) -> str:
    """Letters with a space between."""
    return " ".join(word)


def draw_answer(seed: int, index: int) -> str:
    """Hidden word of a game, uniform over `WORDS`: a pure function of its seed and its number."""
    # The legacy generator's stream is fixed for good.
    return WORDS[np.random.RandomState([seed, index]).randint(len(WORDS))]
