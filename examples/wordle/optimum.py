# SPDX-License-Identifier: Apache-2.0
"""The best expected return of Wordle, exactly, by branch and bound over what can still be hidden.

    python -m examples.wordle.optimum

Guesses and answers come from the same list. The return of a game is minus the number of its wrong guesses, so a
strategy is judged by the sum of wrong guesses over all answers; a word that is not found in time counts six.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

import numpy as np

from .wordle import LENGTH, Wordle, feedback

_ALL_RIGHT = "g" * LENGTH


class Search:
    """Optimal guesses for a list of words. Results are kept, and no order of calls changes one.

    Sets of words are sorted arrays of their numbers.

    Args:
      words: The list, at least one word.
    """

    def __init__(self, words: Sequence[str]):
        self.words = tuple(words)
        self._marks = {_ALL_RIGHT: 0}
        self._table = np.array(
            [
                [self._marks.setdefault(feedback(guess, answer), len(self._marks)) for answer in words]
                for guess in words
            ]
        )
        self._bounds: dict[bytes, tuple[np.ndarray, np.ndarray]] = {}
        self._solved: dict[tuple[bytes, int], tuple[int, int]] = {}
        self._at_least: dict[tuple[bytes, int], int] = {}

    def candidates(self, history: Sequence[tuple[str, str]]) -> np.ndarray:
        """Words that agree with all pairs of a guess and its feedback (`feedback`'s letters, without spaces)."""
        left = np.arange(len(self.words))
        for guess, marks in history:
            row = self._table[self.words.index(guess), left]
            left = left[row == self._marks.get(marks, -1)]
        return left

    def best(self, candidates: np.ndarray, guesses: int) -> tuple[int, int]:
        """Least sum of wrong guesses over the candidates, and the number of the first word of a strategy that has it.

        Args:
          candidates: Words that can be hidden, at least one.
          guesses: How many are left, at least one.
        """
        return self._best(candidates, guesses, limit=guesses * len(candidates) + 1)

    def _best(self, candidates: np.ndarray, guesses: int, *, limit: int) -> tuple[int, int]:
        """`best` where that is below the limit; else the limit or more, with a word that means nothing."""
        count = len(candidates)
        if count <= 2 or guesses == 1:
            return count - 1, int(candidates[0])
        # A guess that tells nothing never pays, so no more guesses matter than there are candidates.
        key = (candidates.tobytes(), min(guesses, count))
        if key in self._solved:
            return self._solved[key]
        if self._at_least.get(key, 0) >= limit:
            return self._at_least[key], -1
        least, word = limit, -1
        for bound, guess in zip(*self._bound(candidates), strict=True):
            if bound >= least:
                break
            groups = self._groups(candidates, guess)
            if len(groups) == 1 and len(groups[0]) == count:
                continue
            floors = [len(group) - 1 if guesses == 2 else self._floor(group) for group in groups]
            total = sum(map(len, groups)) + sum(floors)
            for group, floor in zip(groups, floors, strict=True):
                if total >= least:
                    break
                exact, _ = self._best(group, guesses - 1, limit=least - total + floor)
                total += exact - floor
            if total < least:
                least, word = total, int(guess)
        if word < 0:
            self._at_least[key] = limit
        else:
            self._solved[key] = (least, word)
        return least, word

    def _bound(self, candidates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Lower bounds of the sum of wrong guesses for each first guess, ascending, and those guesses.

        A guess is wrong for all candidates but itself; of each group that it leaves apart, all but one are missed
        by the next guess, too.
        """
        key = candidates.tobytes()
        if key not in self._bounds:
            marks = np.sort(self._table[:, candidates], axis=1)
            kinds = 1 + (marks[:, 1:] != marks[:, :-1]).sum(axis=1)
            is_candidate = np.isin(np.arange(len(self.words)), candidates)
            bounds = 2 * (len(candidates) - is_candidate) - (kinds - is_candidate)
            order = np.argsort(bounds, kind="stable")
            self._bounds[key] = bounds[order], order
        return self._bounds[key]

    def _floor(self, candidates: np.ndarray) -> int:
        """A lower bound of `best` for any number of guesses above one."""
        return len(candidates) - 1 if len(candidates) <= 2 else int(self._bound(candidates)[0][0])

    def _groups(self, candidates: np.ndarray, guess: int) -> list[np.ndarray]:
        """Candidates by the feedback that a guess would have, the largest first, without the guess itself."""
        marks = self._table[guess, candidates]
        order = np.argsort(marks, kind="stable")
        cuts = np.nonzero(np.diff(marks[order]))[0] + 1
        groups = [candidates[part] for part in np.split(order, cuts)]
        return sorted((group for group in groups if group[0] != guess), key=len, reverse=True)


@functools.cache
def search(words: tuple[str, ...]) -> Search:
    """The search of a list, shared by all who ask for it."""
    return Search(words)


def optimal_return(game: Wordle) -> float:
    """Best expected return of a uniformly drawn answer."""
    total, _ = search(game.words).best(np.arange(len(game.words)), game.max_guesses)
    return -total / len(game.words)


def random_return(game: Wordle) -> float:
    """Expected return of uniformly random words of the list: each is wrong with probability 1 - 1/count."""
    wrong = 1 - 1 / len(game.words)
    return -sum(wrong**guess for guess in range(1, game.max_guesses + 1))


def main() -> None:
    """Prints the figures of README.md."""
    game, begin = Wordle(), time.perf_counter()
    found = Search(game.words)
    total, word = found.best(np.arange(len(game.words)), game.max_guesses)
    print(
        f"{-total / len(game.words):8.4f}  optimum: {total} wrong guesses of {len(game.words)} words,",
        end=" ",
    )
    print(f"first {game.words[word]!r}, {time.perf_counter() - begin:.1f} s")
    print(f"{random_return(game):8.4f}  uniformly random words")


if __name__ == "__main__":
    main()
