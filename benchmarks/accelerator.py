# SPDX-License-Identifier: Apache-2.0
"""All rows of the benchmarks that need an accelerator, one process each, their records in one file.

    python benchmarks/accelerator.py --output benchmarks/results/h200.jsonl [--rounds 5]

A row that fails, for want of memory say, is told and left out; the others go on.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
_LARGE = ("--model", "llama-8b", "--lora-rank", "16", "--frozen-dtype", "bfloat16")
_MIDDLE = ("--model", "llama-1b")
_SMALL = ("--model", "qwen2-0.5b")
_PIECES = ("--logprob-chunk-bytes", "1000000000")
ROWS = (
    ("decode.py", *_SMALL, "--rows", "256", "--prompt", "256"),
    ("decode.py", *_SMALL),
    ("decode.py", *_LARGE, "--rows", "128"),
    ("decode.py", *_LARGE, "--rows", "64"),
    ("decode.py", *_LARGE, "--rows", "256"),
    ("decode.py", *_MIDDLE, "--rows", "64"),
    ("decode.py", *_MIDDLE, "--rows", "256"),
    (
        *("ppo_iteration.py", *_SMALL, "--epochs", "1", "--minibatch-size", "128"),
        *("--logprob-chunk-bytes", "4000000000"),
    ),
    ("update.py", *_MIDDLE, "--remat", *_PIECES),
    ("update.py", *_MIDDLE, *_PIECES),
    ("update.py", *_MIDDLE, *_PIECES, "--minibatch-size", "64"),
    ("update.py", *_SMALL, "--epochs", "1", *_PIECES),
    ("update.py", *_LARGE, "--remat"),
    ("update.py", *_MIDDLE, "--remat", *_PIECES, "--attn-implementation", "einsum"),
    ("score.py", *_MIDDLE),
    ("score.py", *_MIDDLE, "--attn-implementation", "einsum"),
    ("sft_step.py", *_MIDDLE, "--remat"),
    ("dpo_step.py", *_MIDDLE, "--remat"),
    ("ddpo.py", "--precision", "bfloat16"),
    ("ddpo.py", "--precision", "tf32"),
    ("ddpo.py", "--precision", "float32"),
    ("ddpo.py", "--precision", "bfloat16", "--lora-rank", "0", "--remat"),
)


def main() -> int:
    """Runs every row; 1 if one of them failed."""
    flags = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    flags.add_argument("--output", type=Path, required=True, help="JSON lines are appended to it")
    flags.add_argument("--rounds", type=int, default=5, help="calls after the first")
    given = flags.parse_args()
    given.output.parent.mkdir(parents=True, exist_ok=True)
    failed = 0
    for script, *options in ROWS:
        command = [sys.executable, str(FOLDER / script), *options, "--rounds", str(given.rounds)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            failed += 1
            print(f"failed ({done.returncode}): {script} {' '.join(options)}", file=sys.stderr)
            continue
        print(done.stdout, end="", flush=True)
        with given.output.open("a", encoding="utf-8") as file:
            file.write(done.stdout)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
