# SPDX-License-Identifier: Apache-2.0
"""Worker: the work of `ppo_trl.py` by `jrl.PPOTrainer`: sampling, scoring, text, rewards and update.

    python benchmarks/peers/ppo_jrl.py [--num-layers-unfrozen -1]

Prints "ready" after two iterations, which compile everything; then, for every line on stdin, runs one and prints its
seconds.
"""

from __future__ import annotations

import argparse
import sys
import time

import jax

from jrl.bench.models import PRESETS, Options, find_subject
from jrl.bench.ppo_iteration import ppo_iteration

MODEL = "gpt2-124m"


def main() -> None:
    """Builds the trainer, then measures on demand."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--num-layers-unfrozen", type=int, default=-1, help="last layers trained; -1: all")
    flags = parser.parse_args()
    subject = find_subject(MODEL, Options(num_layers_unfrozen=flags.num_layers_unfrozen))
    work = ppo_iteration(subject, PRESETS[MODEL].shapes)

    def iterate() -> float:
        begin = time.perf_counter()
        jax.block_until_ready(work.call())
        return time.perf_counter() - begin

    iterate()
    iterate()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(iterate(), flush=True)


if __name__ == "__main__":
    main()
