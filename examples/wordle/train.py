# SPDX-License-Identifier: Apache-2.0
"""Learns Wordle, from recorded games of a middling player or by playing it.

    python -m examples.wordle.train --algorithm ilql --seed 0

Recorded games return -3.83 on average. `--algorithm` is ilql, mc (Q learns the returns of the data), cloning, filtered
(cloning of the best 30 %), or ppo, which plays: its policy has cloned those first. Flags, evaluation and
results are as in `examples.worlds.train`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..worlds.task import Algorithm, Task, Turn, record
from ..worlds.train import flags_of, learn
from .data import episode
from .tokenizer import letter_tokenizer
from .wordle import LENGTH, WORDS, Wordle

DATA_SEED = 0
BEST = {"method": {"best_share": 0.3}}
"""Games that needed three guesses at most, and a few of four: their last guess agrees with all that was answered."""
PLAYED = {"train": {"eval_interval": 100_000}}
"""An online run looks at no game of the policy that it begins with but its own."""
ALGORITHMS = {
    "ilql": Algorithm("ilql_wordle", {}),
    "mc": Algorithm("ilql_wordle", {"method": {"target": "mc"}}),
    "cloning": Algorithm("sft_wordle", {}),
    "filtered": Algorithm("sft_wordle", BEST),
    "ppo": Algorithm("ppo_wordle", {}, clone=("sft_wordle", BEST | PLAYED)),
}
ROW_TOKENS = 7 + 6 * 2 * LENGTH
"""Of the prompt and six turns."""


def main(argv: Sequence[str] | None = None) -> int:
    """Trains one algorithm with one seed."""
    top = flags_of(ALGORITHMS, run="wordle", doc=__doc__)
    top.set_defaults(episodes=50_000)
    flags, overrides = top.parse_known_args(argv)
    return learn(task(), ALGORITHMS, flags, overrides)


def task() -> Task:
    """The game, played once for each hidden word in an evaluation."""
    game = Wordle()
    return Task(
        labels={},
        world=game,
        starts=WORDS,
        record=lambda index: recorded(episode(game, DATA_SEED, index)),
        tokenizer=letter_tokenizer,
        context_turns=None,
        row_tokens=ROW_TOKENS,
    )


def recorded(turns: Sequence[Turn]) -> dict[str, Any]:
    """A recorded game in jrl's form. The sixth guess ends it like the right one; nothing reads what answers either."""
    return record(turns, done=True, last="")


if __name__ == "__main__":
    raise SystemExit(main())
