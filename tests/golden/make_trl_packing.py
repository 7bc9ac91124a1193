# SPDX-License-Identifier: Apache-2.0
"""Packs rows with the real TRL and writes down what it made of them.

    python3.11 -m venv trl-venv
    trl-venv/bin/pip install trl==1.16.0 datasets
    trl-venv/bin/python tests/golden/make_trl_packing.py tests/golden/trl_packing.npz

Token k of row i is 1000·i + k, so that a packed row tells where its tokens come from.
"""

import sys

import numpy as np
from datasets import Dataset
from trl.data_utils import pack_dataset

CAPACITY = 64


def main(out_path: str) -> None:
    """Writes the rows' lengths and, for each strategy, the packed tokens and the lengths of their samples."""
    lengths = np.random.default_rng(7).integers(1, 100, size=120)
    rows = [[1000 * i + k for k in range(n)] for i, n in enumerate(lengths)]
    found = {"lengths": lengths, "capacity": np.asarray(CAPACITY)}
    for strategy in ("bfd", "bfd_split", "wrapped"):
        packed = pack_dataset(Dataset.from_dict({"input_ids": rows}), seq_length=CAPACITY, strategy=strategy)
        tokens = packed["input_ids"]
        found[f"{strategy}_tokens"] = np.concatenate([np.asarray(row) for row in tokens])
        found[f"{strategy}_rows"] = np.asarray([len(row) for row in tokens])
        if "seq_lengths" in packed.column_names:
            parts = packed["seq_lengths"]
            found[f"{strategy}_parts"] = np.concatenate([np.asarray(row) for row in parts])
            found[f"{strategy}_counts"] = np.asarray([len(row) for row in parts])
    np.savez_compressed(out_path, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
