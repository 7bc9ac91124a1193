# SPDX-License-Identifier: Apache-2.0
"""Worker: the work of `ddpo_torch.py` by jrl: the denoising loop and the whole update are one compiled call each.

    python benchmarks/peers/ddpo_jrl.py [--model sd15] [--rows 8] [--steps 50] [--minibatch 4] [--precision bfloat16]

Speaks as `line_protocol.py` does.
"""

from __future__ import annotations

import argparse

from line_protocol import answer
from stable_diffusion import GUIDANCE, MODELS, SCHEDULE

from jrl.bench.ddpo import PRECISIONS, Epoch, EpochShapes, precision_context, random_model


def main() -> None:
    """Compiles, then measures on demand."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="sd15")
    parser.add_argument("--rows", type=int, default=8, help="samples of an epoch")
    parser.add_argument("--steps", type=int, default=50, help="denoising steps")
    parser.add_argument("--minibatch", type=int, default=4, help="samples of a microbatch")
    parser.add_argument("--precision", choices=PRECISIONS, default="bfloat16")
    parser.add_argument("--remat", action="store_true", help="gradient checkpointing")
    flags = parser.parse_args()
    shapes = EpochShapes(
        rows=flags.rows,
        steps=flags.steps,
        minibatch=flags.minibatch,
        guidance=GUIDANCE,
        precision=flags.precision,
        lora_rank=4,
        remat=flags.remat,
    )
    with precision_context(shapes.precision):
        epoch = Epoch(random_model(flags.model, MODELS[flags.model], SCHEDULE), shapes)
        epoch()
        answer(epoch)


if __name__ == "__main__":
    main()
