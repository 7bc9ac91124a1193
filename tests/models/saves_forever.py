# SPDX-License-Identifier: Apache-2.0
"""A process that saves two checkpoints in turn into one folder, in children that it kills; see test_checkpoint_killed.

    python -m tests.models.saves_forever FOLDER ROUNDS

After every kill it checks that the folder is wholly the one or wholly the other, and prints one letter for what it is.
The arrays are NumPy's: a process in which JAX computes must not be forked.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file

from jrl.models.checkpoint import save_checkpoint
from jrl.models.model import CausalLM
from tests.tiny import tiny_hf_config

# Different values, shard sizes and configs: any mixture of the two shows.
KINDS = {"A": (1.0, 10**9), "B": (2.0, 20_000)}


def save(folder: Path, kind: str) -> None:
    value, max_shard_bytes = KINDS[kind]
    model = CausalLM.from_config(tiny_hf_config("gpt2", bos_token_id=int(value)))
    shapes = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)))
    params = jax.tree.map(lambda leaf: np.full(leaf.shape, value, np.float32), shapes)
    save_checkpoint(folder, model, params, max_shard_bytes=max_shard_bytes)


def check(folder: Path) -> str:
    """Which of the two the folder holds; raises if it is neither."""
    config = json.loads((folder / "config.json").read_text())
    kind = "A" if config["bos_token_id"] == 1 else "B"
    single = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    assert single.exists() is (kind == "A") and index.exists() is (kind == "B"), os.listdir(folder)
    if kind == "A":
        found = load_file(single)
    else:
        found = {}
        for shard in set(json.loads(index.read_text())["weight_map"].values()):
            found |= load_file(folder / shard)
    assert len(found) == 28, len(found)
    assert all((tensor == KINDS[kind][0]).all() for tensor in found.values())
    assert (folder / "notes.txt").read_text() == "kept"
    return kind


def main() -> None:
    folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
    save(folder, "A")
    (folder / "notes.txt").write_text("kept")
    begin = time.perf_counter()
    save(folder, "B")
    duration = time.perf_counter() - begin
    chance = random.Random(0)
    for _ in range(rounds):
        child = os.fork()
        if child == 0:
            while True:
                for kind in KINDS:
                    save(folder, kind)
        time.sleep(chance.uniform(0, 3 * duration))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        print(check(folder), end="", flush=True)


if __name__ == "__main__":
    main()
