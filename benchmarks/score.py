# SPDX-License-Identifier: Apache-2.0
"""Scoring under policy and reference, beside the least time that it takes on this machine.

    python benchmarks/score.py [--model gpt2-124m] [--rows 32] [--rounds 5]

Prints one JSON line; benchmarks/README.md describes its fields and lists the presets. `--help` lists all flags.
"""

from jrl.cli.bench import run_script

if __name__ == "__main__":
    run_script("score", __doc__)
