# SPDX-License-Identifier: Apache-2.0
"""Epochs of DDPO on a Stable Diffusion of random weights: speed, memory, and ratios before any update.

    python benchmarks/ddpo.py [--model sd15] [--precision bfloat16] [--rows 32] [--minibatch 8] [--lora-rank 4]

An epoch draws `rows` samples in `steps` steps under guidance 5, decodes them, and takes one optimizer step. Nothing has
changed between sampling and the update's first step, so a ratio that is not 1 there is rounding. `--model tiny
--precision float32` runs on a CPU. Prints one JSON line; benchmarks/README.md describes its fields.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

from stable_diffusion import GUIDANCE, MODELS, SCHEDULE

from jrl.bench.ddpo import PRECISIONS, EpochShapes, measure_ddpo


def main() -> None:
    """Measures and prints."""
    flags = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    flags.add_argument("--model", choices=MODELS, default="sd15")
    flags.add_argument("--precision", choices=PRECISIONS, default="bfloat16")
    flags.add_argument("--rows", type=int, default=32, help="samples of an epoch")
    flags.add_argument("--steps", type=int, default=50, help="denoising steps")
    flags.add_argument("--minibatch", type=int, default=8, help="samples of a microbatch")
    flags.add_argument("--lora-rank", type=int, default=4, help="0: the whole U-Net trains")
    flags.add_argument("--remat", action="store_true", help="gradient checkpointing")
    flags.add_argument("--rounds", type=int, default=3, help="epochs after the first")
    given = flags.parse_args()
    shapes = EpochShapes(
        rows=given.rows,
        steps=given.steps,
        minibatch=given.minibatch,
        guidance=GUIDANCE,
        precision=given.precision,
        lora_rank=given.lora_rank,
        remat=given.remat,
    )
    record = measure_ddpo(given.model, MODELS[given.model], SCHEDULE, shapes, rounds=given.rounds)
    print(json.dumps(record))


if __name__ == "__main__":
    main()
