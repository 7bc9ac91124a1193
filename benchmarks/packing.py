# SPDX-License-Identifier: Apache-2.0
"""How long packing takes, and how full its rows are.

python benchmarks/packing.py [--samples 100000] [--length 2048]
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from jrl.data.demonstrations.packing import STRATEGIES, pack_rows
from jrl.data.demonstrations.rows import DialogueRow


def main() -> None:
    flags = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    flags.add_argument("--samples", type=int, default=100_000)
    flags.add_argument("--length", type=int, default=2048, help="of a row, and of the longest sample")
    given = flags.parse_args()
    lengths = np.random.default_rng(0).integers(1, given.length + 1, given.samples)
    rows = [DialogueRow([7] * length, [True] * length) for length in lengths.tolist()]
    for strategy in STRATEGIES:
        began = time.process_time()
        STRATEGIES[strategy](lengths.tolist(), given.length)
        layout = time.process_time() - began
        wall, began = time.perf_counter(), time.process_time()
        packed = pack_rows(rows, strategy=strategy, capacity=given.length)
        wall, seconds = time.perf_counter() - wall, time.process_time() - began
        full = lengths.sum() / (len(packed) * given.length)
        print(
            f"{strategy}: {wall:.2f} s ({seconds:.2f} s of processor time, of which {layout:.2f} s the layout), "
            f"{len(packed)} rows, {full:.2%} full"
        )


if __name__ == "__main__":
    main()
