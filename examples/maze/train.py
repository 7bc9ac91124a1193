# SPDX-License-Identifier: Apache-2.0
"""Learns the maze, from recorded episodes of a poor player or by playing it.

    python -m examples.maze.train --algorithm ilql --observed fully --seed 0

Recorded episodes return -83 on average. `--algorithm` is ilql, mc (Q learns the returns of the data), cloning, filtered
(cloning of the best tenth), or ppo, which plays: its policy has cloned recorded episodes first. Flags, evaluation and
results are as in `examples.worlds.train`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..worlds.task import Algorithm, Task, Turn, record
from ..worlds.train import flags_of, learn
from .data import episode
from .maze import STARTS, SUCCESS, Maze
from .tokenizer import clause_tokenizer

SHORT = {"train": {"total_steps": 1500}, "scheduler": {"kwargs": {"T_max": 1500}}}
CLONE = {
    "method": {"context_turns": None},
    "train": {"seq_length": 190, "batch_size": 16, "total_steps": 200, "eval_interval": 200},
    "scheduler": {"kwargs": {"T_max": 200}},
}
"""Cloning for a player who remembers its episode."""
ALGORITHMS = {
    "ilql": Algorithm("ilql_maze", {}),
    "mc": Algorithm("ilql_maze", SHORT | {"method": {"target": "mc"}}),  # nothing spreads from turn to turn
    "cloning": Algorithm("sft_maze", {}),
    "filtered": Algorithm("sft_maze", {"method": {"best_share": 0.1}}),
    "ppo": Algorithm("ppo_maze", {}, clone=("sft_maze", CLONE)),
}
DATA_SEED = 0
LONGER = {
    "method": {
        "gen_experience_kwargs": {
            "max_new_tokens": 360,
            "max_turns": 40,
            "max_turn_tokens": 1,
            "do_sample": True,
        }
    }
}
"""PPO of a player who sees walls alone: within 20 moves it does not reach the goal from some starts."""
MEMORY = {"fully": (0, 9), "partly": (2, 15)}
"""Turns that an offline player remembers, and the tokens of the longest row with them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Trains one algorithm with one seed."""
    top = flags_of(ALGORITHMS, run="maze", doc=__doc__)
    top.add_argument("--observed", choices=list(MEMORY), default="fully")
    flags, overrides = top.parse_known_args(argv)
    chosen = ALGORITHMS | (
        {"ppo": ALGORITHMS["ppo"]._replace(changes=LONGER)} if flags.observed == "partly" else {}
    )
    return learn(task(flags.observed), chosen, flags, overrides)


def task(observed: str) -> Task:
    """The maze, `fully` or `partly` observed."""
    maze, (context_turns, row_tokens) = Maze(shows_position=observed == "fully"), MEMORY[observed]
    return Task(
        labels={"observed": observed},
        world=maze,
        starts=STARTS,
        record=lambda index: recorded(episode(maze, DATA_SEED, index)),
        tokenizer=clause_tokenizer,
        context_turns=context_turns,
        row_tokens=row_tokens,
    )


def recorded(turns: Sequence[Turn]) -> dict[str, Any]:
    """A recorded episode in jrl's form. The limit of moves is no end of the maze: an episode it cut is not `done`."""
    return record(turns, done=turns[-1].reward == 0, last=SUCCESS)


if __name__ == "__main__":
    raise SystemExit(main())
