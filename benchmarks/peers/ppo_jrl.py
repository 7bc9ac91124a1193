# SPDX-License-Identifier: Apache-2.0
"""Worker: the work of `ppo_trl.py` or `ppo_torch.py` by `jrl.PPOTrainer`: sampling, scoring, text, rewards, update.

    python benchmarks/peers/ppo_jrl.py [--model gpt2-124m] [--num-layers-unfrozen -1] [--iterations 1]

Answers by `line_protocol.py`, after two iterations, which compile everything.
"""

from __future__ import annotations

import argparse

import jax
from line_protocol import answer

from jrl.bench.models import PRESETS, Options, find_subject
from jrl.bench.ppo_iteration import ppo_iteration


def main() -> None:
    """Builds the trainer, then measures on demand."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--num-layers-unfrozen", type=int, default=-1, help="last layers trained; -1: all")
    parser.add_argument("--model", choices=("gpt2-124m", "randomwalks"), default="gpt2-124m")
    parser.add_argument("--iterations", type=int, default=1, help="iterations of a run")
    flags = parser.parse_args()
    subject = find_subject(flags.model, Options(num_layers_unfrozen=flags.num_layers_unfrozen))
    work = ppo_iteration(subject, PRESETS[flags.model].shapes)

    def iterate() -> None:
        for _ in range(flags.iterations):
            jax.block_until_ready(work.call())

    iterate()
    iterate()
    answer(iterate)


if __name__ == "__main__":
    main()
