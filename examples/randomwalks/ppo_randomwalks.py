# SPDX-License-Identifier: Apache-2.0
"""Shortest paths by PPO: a language model of random walks learns to reach the goal, with trlX's recipe.

    python examples/randomwalks/ppo_randomwalks.py --seed 0 1 2

First a 6-layer GPT-2 of 1.7 million parameters reads the 1000 walks of graph 1000 (SFT), then PPO rewards
optimality: 1 for a shortest path, 0 for a wrong or unfinished one. Every evaluation samples each of the 20
starts 50 times. The table sets the result beside the figures of trlX v0.7.0 on the same graph and model.
"""

from __future__ import annotations

from collections.abc import Sequence

from online import run_online

TRLX = {
    0: "0.36 [0.31..0.46]",
    20: "0.83 [0.74..0.92]",
    60: "0.92 [0.88..0.99]",
    100: "0.92 [0.90..0.95]",
    160: "0.93 [0.85..1.00]",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs SFT and PPO for each seed and prints optimality over steps."""
    return run_online(argv, "ppo", doc=__doc__, trlx=TRLX, trlx_title="trlX v0.7.0, 5 seeds")


if __name__ == "__main__":
    raise SystemExit(main())
