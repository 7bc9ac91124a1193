# SPDX-License-Identifier: Apache-2.0
"""Sampling, beside the least time that its operations and bytes take on this machine.

    python benchmarks/decode.py [--model gpt2-124m] [--rows 32] [--rounds 5]

Prints one JSON line; benchmarks/README.md describes its fields and lists the presets. `--help` lists all flags.
"""

from jrl.cli.bench import run_script

if __name__ == "__main__":
    run_script("decode", __doc__)
