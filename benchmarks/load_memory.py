# SPDX-License-Identifier: Apache-2.0
"""Peak memory of loading a checkpoint, against the bound: this host's share + 2.25 × the largest parameter.

    python benchmarks/load_memory.py [--gigabytes 1.5] [--shards 5] [--file-dtype float32] [--dtype float32]

Writes a random llama-shaped checkpoint, then loads it in a child process on virtual devices (`fsdp`), and prints one
JSON line, sizes in MiB. The peak is the child's VmHWM, its largest resident size ever, minus its resident size right
after `import jrl`; files are mapped 16 MiB at a time, so that little of it is page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

WIDTH, MLP_WIDTH = 2048, 5632
# A child of its own: what the writer used would count as well.
WORKER = """
import json, sys, time

def resident(field):
    for line in open("/proc/self/status"):
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024

import jrl
from jrl.mesh import make_mesh
from jrl.models.checkpoint import load_checkpoint
import jax, jax.numpy as jnp

folder, dtype, devices = sys.argv[1], jnp.dtype(sys.argv[2]), int(sys.argv[3])
before = resident("VmRSS")
start = time.perf_counter()
loaded = load_checkpoint(folder, dtype=dtype, mesh=make_mesh(1, devices, 1))
seconds = time.perf_counter() - start
leaves = jax.tree.leaves(loaded.params)
share = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
print(json.dumps(dict(share=share, largest=max(leaf.nbytes for leaf in leaves), peak=resident("VmHWM") - before,
                      settled=resident("VmRSS") - before, seconds=seconds)))
"""


def write(folder: Path, num_bytes: int, shards: int, dtype: str, vocab_size: int) -> None:
    """A random llama checkpoint of about this size, in that many files."""
    import jax
    import numpy as np
    from transformers import LlamaConfig

    from jrl.models.model import CausalLM
    from jrl.models.safetensors_write import LazyTensor, write_tensors

    def config(num_layers: int) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=WIDTH,
            intermediate_size=MLP_WIDTH,
            vocab_size=vocab_size,
            num_attention_heads=16,
            num_key_value_heads=4,
            num_hidden_layers=num_layers,
            tie_word_embeddings=False,
        )

    kind = np.dtype(jax.numpy.dtype(dtype))

    def size(num_layers: int) -> int:
        entries = CausalLM.from_config(config(num_layers)).entries()
        return sum(int(np.prod(entry.shape)) for entry in entries) * kind.itemsize

    num_layers = 1 + max(0, -(-(num_bytes - size(1)) // (size(2) - size(1))))
    rng = np.random.default_rng(0)

    def tensor(shape: tuple[int, ...]) -> LazyTensor:
        return LazyTensor(kind, shape, lambda: rng.standard_normal(shape, np.float32).astype(kind))

    entries = CausalLM.from_config(config(num_layers)).entries()
    tensors = {entry.name: tensor(entry.shape) for entry in entries}
    total = sum(tensor.num_bytes for tensor in tensors.values())
    folder.mkdir(parents=True)
    # The smallest limit that needs no more files than asked for.
    limit = next(
        limit
        for limit in range(-(-total // shards), 2 * total, max(1, total // 1000))
        if _num_files([tensor.num_bytes for tensor in tensors.values()], limit) <= shards
    )
    write_tensors(folder, tensors, max_shard_bytes=limit)
    config(num_layers).save_pretrained(folder)


def _num_files(sizes: list[int], limit: int) -> int:
    count, filled = 1, 0
    for size in sizes:
        if filled and filled + size > limit:
            count, filled = count + 1, 0
        filled += size
    return count


def measure(folder: Path, dtype: str, devices: int) -> dict[str, float | bool]:
    """Loads the checkpoint in a child process; sizes in MiB."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}".strip()
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", WORKER, str(folder), dtype, str(devices)]
    found = json.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout)
    bound = found["share"] + 2.25 * found["largest"]
    sizes = {"share": found["share"], "largest": found["largest"], "peak": found["peak"], "bound": bound}
    return {
        **{name: round(value / 2**20, 1) for name, value in sizes.items()},
        "ok": found["peak"] <= bound,
        "settled": round(found["settled"] / 2**20, 1),
        "seconds": round(found["seconds"], 2),
    }


def main() -> int:
    """Writes, measures, prints; 1 if the bound does not hold."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--gigabytes", type=float, default=1.5, help="of the files")
    flags.add_argument("--shards", type=int, default=5, help="files")
    flags.add_argument("--file-dtype", default="float32", choices=("float32", "bfloat16"))
    flags.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16"), help="of the parameters"
    )
    flags.add_argument("--devices", type=int, default=2, help="virtual ones; parameters are split over them")
    flags.add_argument("--vocab-size", type=int, default=32000, help="rows of the two largest parameters")
    flags.add_argument("--folder", type=Path, help="default: a temporary one")
    chosen = flags.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as parent:
        folder = Path(parent) / "model"
        write(folder, int(chosen.gigabytes * 1e9), chosen.shards, chosen.file_dtype, chosen.vocab_size)
        files = [file.stat().st_size for file in folder.glob("*.safetensors")]
        found = {
            "file_gb": round(sum(files) / 1e9, 3),
            "files": len(files),
            "file_dtype": chosen.file_dtype,
            "dtype": chosen.dtype,
            "devices": chosen.devices,
            "unit": "MiB",
            **measure(folder, chosen.dtype, chosen.devices),
        }
    print(json.dumps(found))
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
