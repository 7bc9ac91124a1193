# SPDX-License-Identifier: Apache-2.0
"""The table of docs/scaling.md: what `jrl plan` says of Llama-2 shapes on many devices.

    python benchmarks/llama_plans.py            # from models of one and of two layers
    python benchmarks/llama_plans.py --whole    # from whole ones, which takes minutes

All that grows with the layers grows by the same for each, but what is computed again: a mean of all layers.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping

from transformers import LlamaConfig

import jrl
from jrl.mesh import abstract_mesh
from jrl.trainers.plan.run_plan import RunPlan, plan_run

GIB = 1 << 30
WIDTHS = {
    "7B": (4096, 11008, 32, 32, 32),
    "13B": (5120, 13824, 40, 40, 40),
    "70B": (8192, 28672, 80, 64, 8),
}
"""Width, width of the MLP, layers, heads, heads that queries share."""
ROWS = (
    ("7B", (1, 8, 1), False),
    ("7B", (8, 8, 1), False),
    ("7B", (32, 8, 1), False),
    ("13B", (1, 8, 1), False),
    ("13B", (1, 64, 1), False),
    ("13B", (4, 64, 1), False),
    ("70B", (1, 1, 8), True),
    ("70B", (1, 8, 8), False),
    ("70B", (4, 8, 8), False),
)
"""Model; data, fsdp and tensor; whether LoRA trains."""
_MEAN = "activations of the layer computed again"


def main() -> None:
    """Prints the table's rows."""
    top = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    top.add_argument("--whole", action="store_true", help="plan whole models")
    flags = top.parse_args()
    for name, sizes, lora in ROWS:
        layers = WIDTHS[name][2]
        if flags.whole:
            found = figures(plan(name, sizes, layers, lora=lora), layers)
        else:
            one, two = (figures(plan(name, sizes, count, lora=lora), count) for count in (1, 2))
            found = {key: one[key] + (layers - 1) * (two[key] - one[key]) for key in one}
        cells = [name + (", LoRA" if lora else ""), str(sizes[0] * sizes[1] * sizes[2]), f"{sizes}"[1:-1]]
        cells += [f"{size:.1f}" if size else "0" for size in columns(found, layers)]
        print(f"| {' | '.join(cells)} |", flush=True)


def architecture(name: str, layers: int | None = None) -> LlamaConfig:
    """Llama-2 of a size, with so many layers; None: all."""
    width, mlp, whole, heads, shared = WIDTHS[name]
    return LlamaConfig(
        vocab_size=32000,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=whole if layers is None else layers,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        tie_word_embeddings=False,
    )


def plan(name: str, sizes: tuple[int, int, int], layers: int, *, lora: bool) -> RunPlan:
    """PPO with a row of a microbatch and 8 of a sampling call on each device that shares the rows (LoRA: 8 and 64)."""
    data, fsdp, tensor = sizes
    rows = (8 if lora else 1) * data * fsdp
    adapter = {"peft_type": "LORA", "r": 16, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    config = jrl.default_ppo_config().evolve(
        model={"model_path": architecture(name, layers), "num_layers_unfrozen": -1}
        | ({"peft_config": adapter, "frozen_dtype": "bfloat16"} if lora else {}),
        train={
            **{"seq_length": 1024, "compute_dtype": "bfloat16", "remat": True},
            **{"batch_size": rows, "minibatch_size": rows},
        },
        method={"chunk_size": 8 * rows, "num_rollouts": 8 * rows},
    )
    return plan_run(config, abstract_mesh(data, fsdp, tensor, num_devices=data * fsdp * tensor))


def figures(found: RunPlan, layers: int) -> dict[str, float]:
    """Bytes by part and name; a mean of layers as their sum."""
    parts = {
        "held": found.held,
        **{f"learning {moment}": sizes for moment, sizes in found.learning.items()},
        "sampling": found.sampling,
        "step": found.step_traffic,
        "call": found.token_traffic,
        "score": found.score_traffic,
    }
    return {
        f"{part}: {name}": layers * size if name == _MEAN else size
        for part, sizes in parts.items()
        for name, size in sizes.items()
    }


def columns(found: Mapping[str, float], layers: int) -> Iterator[float]:
    """The table's columns in GiB."""

    def total(*prefixes: str) -> float:
        return sum(
            size / (layers if name.endswith(_MEAN) else 1) / GIB
            for name, size in found.items()
            if name.startswith(prefixes)
        )

    held, sampling = (total(part) for part in ("held", "sampling"))
    moments = {name.partition(":")[0] for name in found if name.startswith("learning")}
    learning = max(total(f"{moment}:") for moment in moments)
    yield from (held, learning, sampling, held + max(learning, sampling))
    yield from (total(part) for part in ("step: fsdp", "step: data", "step: tensor"))
    yield from (total(part) for part in ("call: fsdp", "score: fsdp", "score: tensor"))


if __name__ == "__main__":
    main()
