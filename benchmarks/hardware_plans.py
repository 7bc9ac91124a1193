# SPDX-License-Identifier: Apache-2.0
"""The table of docs/hardware.md: memory of one device by model and algorithm, planned and as a compiler reserves it.

    python -m benchmarks.hardware_plans
    python -m benchmarks.hardware_plans compile [--model "Llama 2 7B"] [--trained LoRA] [--method PPO]

Models are planned with one and with two layers: all that grows with the layers grows by the same for each. They are
compiled whole, for a GPU that a plan fills at most by nine tenths (`pip install 'jrl-post[plan-gpu]'`; no such device
is needed). A case that is on file is not compiled again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

import jrl
from benchmarks.compiled_plans import recorded, with_layers
from benchmarks.llama_plans import architecture, columns, figures
from jrl.bench.models import PRESETS
from jrl.mesh import abstract_mesh, make_mesh
from jrl.trainers.plan.compiled import compile_run
from jrl.trainers.plan.run_plan import plan_run
from jrl.trainers.plan.targets import GIB, parse_target

ROWS, MICROBATCH, TOKENS = 32, 4, 512
CARDS = (8, 16, 24, 40, 80, 141)
"""GiB of common accelerators, the smallest first."""
HEADROOM = 0.9
"""Share of a device that may be filled: CUDA and its libraries have the rest."""
TARGETS = {"gpu:rtx4090": 24, "gpu:h100": 80, "gpu:h200": 141}
"""What is compiled for, the smallest first, and its GiB in `CARDS`."""
RESULTS = Path(__file__).resolve().parent / "results" / "hardware_plans.jsonl"


@dataclass(frozen=True)
class Model:
    """Shapes of a model.

    Attributes:
      config: Makes its transformers config.
      targets: Kernels that LoRA adapts.
    """

    config: Callable[[], PretrainedConfig]
    targets: tuple[str, ...] = ("q_proj", "v_proj")


MODELS = {
    "GPT-2, 0.1B": Model(PRESETS["gpt2-124m"].config, ("c_attn",)),
    "Qwen2.5 0.5B": Model(PRESETS["qwen2-0.5b"].config),
    "Llama 3.2 1B": Model(PRESETS["llama-1b"].config),
    "Llama 2 7B": Model(partial(architecture, "7B")),
    "Llama 2 13B": Model(partial(architecture, "13B")),
}
TRAINED = {"all layers": None, "LoRA": "bfloat16", "LoRA, base in 4 bits": "nf4"}
"""What trains, and in which dtype the base of an adapter lies."""
METHODS = {
    "SFT": jrl.default_sft_config,
    "DPO": jrl.default_dpo_config,
    "PPO": jrl.default_ppo_config,
    "GRPO": jrl.default_grpo_config,
}
SAMPLING = {
    "PPO": {"chunk_size": ROWS, "num_rollouts": ROWS},
    "GRPO": {"chunk_size": ROWS, "num_rollouts": ROWS, "num_generations": 8},
}


def main() -> None:
    """Prints the table, or compiles what is missing."""
    top = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    top.add_argument("what", nargs="?", choices=["table", "compile"], default="table")
    top.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS))
    top.add_argument("--trained", nargs="+", choices=list(TRAINED), default=list(TRAINED))
    top.add_argument("--method", nargs="+", choices=list(METHODS), default=list(METHODS))
    flags = top.parse_args()
    if flags.what == "table":
        print("\n".join(table()))
        return
    for case in product(flags.model, flags.trained, flags.method):
        if case not in on_file():
            compile_case(*case)


def table() -> Iterator[str]:
    """Lines of the table: GiB planned and reserved and, behind them, the smallest card with room to spare."""
    yield f"| model | trained | {' | '.join(METHODS)} |"
    yield f"|{'---|' * (2 + len(METHODS))}"
    reserved = on_file()
    for name, trained in product(MODELS, TRAINED):
        cells = (
            cell(at_most(MODELS[name], method, TRAINED[trained]), reserved.get((name, trained, method)))
            for method in METHODS
        )
        yield f"| {name} | {trained} | {' | '.join(cells)} |"


def on_file() -> dict[tuple[str, str, str], float]:
    """GiB that a compiler reserves in all, by model, what trains, and method."""
    return {(row["model"], row["trained"], row["method"]): row["total"] / GIB for row in recorded(RESULTS)}


def compile_case(name: str, trained: str, method: str) -> None:
    """Compiles a run whole for the smallest target that its plan fits, and adds a line to the file."""
    model = MODELS[name]
    planned = at_most(model, method, TRAINED[trained])
    place = next((name for name, size in TARGETS.items() if planned <= HEADROOM * size), None)
    if place is None:
        return
    target = parse_target(place)
    config = recipe(model, method, TRAINED[trained], model.config().num_hidden_layers)
    found = compile_run(config, target, make_mesh(1, 1, 1, devices=target.devices()))
    row = {
        **{"model": name, "trained": trained, "method": method, "target": place},
        **{"total": found.total, "held": found.held_bytes},
        "programs": {program.name: program.own_bytes for program in found.programs},
        "too_large": dict(found.too_large),
        "seconds": round(sum(program.seconds for program in found.programs)),
    }
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def at_most(model: Model, method: str, frozen_dtype: str | None) -> float:
    """GiB of one device at its fullest moment; LoRA over a base of this dtype, or, of None, all layers."""
    layers = model.config().num_hidden_layers
    device = abstract_mesh(1, 1, 1, num_devices=1, device=parse_target("gpu:h100").device)
    one, two = (
        figures(plan_run(recipe(model, method, frozen_dtype, count), device), count) for count in (1, 2)
    )
    whole = {key: one[key] + (layers - 1) * (two[key] - one[key]) for key in one}
    _held, _learning, _sampling, most, *_sent = columns(whole, layers)
    return most


def recipe(model: Model, method: str, frozen_dtype: str | None, layers: int) -> jrl.TRLConfig:
    """One device's run of the model with so many layers."""
    config = with_layers(model.config(), layers)
    sections: dict[str, Any] = {"model_path": config, "num_layers_unfrozen": -1}
    if frozen_dtype is not None:
        adapter = {"peft_type": "LORA", "r": 16, "lora_alpha": 16, "target_modules": list(model.targets)}
        sections |= {"peft_config": adapter, "frozen_dtype": frozen_dtype}
    return METHODS[method]().evolve(
        model=sections,
        train={
            **{"seq_length": TOKENS, "compute_dtype": "bfloat16", "remat": True},
            **{"batch_size": ROWS, "minibatch_size": MICROBATCH},
        },
        method=SAMPLING.get(method, {}),
    )


def cell(planned: float, reserved: float | None) -> str:
    """What is planned and what a compiler reserves, "-" where it was not asked, and the smallest card that holds both.

    "several" in place of a card that none is large enough.
    """
    most = planned if reserved is None else max(planned, reserved)
    card = next((card for card in CARDS if most <= HEADROOM * card), None)
    told = "-" if reserved is None else f"{reserved:.1f}"
    return f"{planned:.1f} / {told} ({'several' if card is None else card})"


if __name__ == "__main__":
    main()
