# SPDX-License-Identifier: Apache-2.0
"""Completions of one sampling, some in each process, and how they and their rewards come together.

Each process decodes the rows that lie on its devices. What the host then decides on is gathered once, at the end of
the sampling: what goes from host to host queues on the devices behind the work that they already have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl.distributed import PeerError, gather, is_main
from jrl.rollout.reward_call import RewardCall
from jrl.rollout.reward_columns import RewardColumns
from jrl.rollout.rewards import RewardError
from jrl.rollout.text import Texts

AsArray = Callable[[Sequence[float | np.ndarray], Texts], np.ndarray]
"""Rewards of some completions, and these, to an array with one entry a completion."""


class Part(NamedTuple):
    """Completions that this process answers for.

    Attributes:
      numbers: Of the rows, among all of the sampling.
      texts: One a row.
    """

    numbers: np.ndarray
    texts: Texts

    @staticmethod
    def concatenate(parts: Sequence[Part]) -> Part:
        """The rows of all parts, in order; at least one part."""
        numbers = [part.numbers for part in parts]
        return Part(np.concatenate(numbers), Texts.concatenate([part.texts for part in parts]))


def totals(rewards: Sequence[float | np.ndarray], texts: Texts) -> np.ndarray:
    """Total reward of each completion, whether its rewards are one number or one a token; NaN where there is none."""
    del texts
    return np.asarray([math.fsum(np.atleast_1d(reward)) for reward in rewards], np.float64)


def to_main(part: Part) -> Part:
    """The rows of all processes for process 0, in order, and none for the others. All must call it."""
    whole = _join(gather(*_packed(part)))[0]
    return whole if is_main() else Part(whole.numbers[:0], whole.texts.take([]))


class Judgement(NamedTuple):
    """All completions of one sampling and their rewards, in order and in every process.

    Attributes:
      texts: The completions.
      rewards: What was kept of their rewards, one row a completion; None where there is nothing to judge by.
      columns: What each reward function said of them; None likewise.
    """

    texts: Texts
    rewards: np.ndarray | None
    columns: RewardColumns | None


class Judging:
    """Rewards of one sampling, part by part as they come, and in the end of all of it.

    A reward function that fails in one process fails in all: the others learn of it when the parts come together, and
    until then dispatch what they would have dispatched.

    Args:
      rewards: The user's reward functions; None: there is nothing to judge by.
      as_array: What is kept of rewards.
    """

    def __init__(self, rewards: RewardCall | None, as_array: AsArray) -> None:
        self._rewards, self._as_array = rewards, as_array
        self._parts: list[Part] = []
        self._found: list[dict[str, np.ndarray]] = []
        self._failure: Exception | None = None

    def add(self, part: Part, metadata: Mapping[str, Sequence[Any]], *, label: str) -> None:
        """Calls the reward function.

        Args:
          part: This process's rows.
          metadata: One list a key, aligned with them.
          label: As for `RewardCall`.
        Raises:
          Exception: What the function failed with, where there is one process.
        """
        self._parts.append(part)
        if self._rewards is None or self._failure is not None or not len(part.numbers):
            return
        try:
            judged = self._rewards(part.texts, metadata, label=label)
            self._found.append(
                {
                    "rewards": self._as_array(judged.rewards, part.texts),
                    "scores": judged.columns.scores,
                    "not_applicable": judged.columns.not_applicable,
                }
            )
        except Exception as error:  # user code: anything may come
            if jax.process_count() == 1:
                raise
            self._failure = error

    def together(self) -> Judgement:
        """All completions and their rewards; every process must call it.

        Raises:
          RewardError: In all processes, if the reward function failed in one of them.
        """
        plain, arrays = _packed(Part.concatenate(self._parts))
        if self._found:
            arrays |= {
                name: np.concatenate([found[name] for found in self._found]) for name in self._found[0]
            }
        try:
            words = gather(plain, arrays, failure=self._failure)
        except PeerError as error:
            raise RewardError(str(error)) from error
        whole, order = _join(words)
        if self._rewards is None:
            return Judgement(whole.texts, None, None)

        def gathered(name: str) -> np.ndarray:
            return np.concatenate([word.arrays[name] for word in words if name in word.arrays])[order]

        columns = RewardColumns(
            tuple(self._rewards.functions), gathered("scores"), gathered("not_applicable")
        )
        return Judgement(whole.texts, gathered("rewards"), columns)


def all_texts(parts: Sequence[Part]) -> Texts:
    """All completions, in order and in every process; all must call it."""
    return _join(gather(*_packed(Part.concatenate(parts))))[0].texts


def _packed(part: Part) -> tuple[dict[str, list[Any]], dict[str, np.ndarray]]:
    """Packs a part for `gather`."""
    texts = part.texts
    plain: dict[str, list[Any]] = {
        "samples": texts.samples,
        "prompts": texts.prompts,
        "outputs": texts.outputs,
    }
    if texts.turns is not None and texts.failures is not None:
        plain |= {"turns": texts.turns, "failures": texts.failures}
    arrays = {
        "numbers": part.numbers,
        "tokens": np.asarray([token for row in texts.output_tokens for token in row], np.int32),
        "lengths": texts.lengths,
        "stopped": texts.stopped,
    }
    return plain, arrays


def _join(words: Sequence[Any]) -> tuple[Part, np.ndarray]:
    """Joins the packed parts of all processes to one part, with its rows' places among theirs."""
    parts = []
    for word in words:
        tokens, lengths = word.arrays["tokens"].tolist(), word.arrays["lengths"]
        ends = np.cumsum(lengths)
        rows = [tokens[end - length : end] for end, length in zip(ends, lengths, strict=True)]
        texts = Texts(output_tokens=rows, lengths=lengths, stopped=word.arrays["stopped"], **word.plain)
        parts.append(Part(word.arrays["numbers"], texts))
    whole = Part.concatenate(parts)
    order = np.argsort(whole.numbers)
    return Part(whole.numbers[order], whole.texts.take(order)), order
