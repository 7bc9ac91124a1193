# SPDX-License-Identifier: Apache-2.0
"""Shortest paths by GRPO: a language model of random walks learns from groups of its own walks, without a critic.

    python examples/randomwalks/grpo_randomwalks.py --seed 0 1 2

First a 6-layer GPT-2 of 1.7 million parameters reads the 1000 walks of graph 1000 (SFT). Then GRPO compares 8 walks
from each of 16 starts an iteration. Every evaluation samples each of the 20 starts 50 times. The table sets the result
beside the figures of PPO in trlX v0.7.0 on the same graph and model.
"""

from __future__ import annotations

from collections.abc import Sequence

from online import run_online
from ppo_randomwalks import TRLX


def main(argv: Sequence[str] | None = None) -> int:
    """Runs SFT and GRPO for each seed and prints optimality over steps."""
    return run_online(argv, "grpo", doc=__doc__, trlx=TRLX, trlx_title="PPO of trlX v0.7.0, 5 seeds")


if __name__ == "__main__":
    raise SystemExit(main())
