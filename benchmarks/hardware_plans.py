# SPDX-License-Identifier: Apache-2.0
"""The table of docs/hardware.md: memory of one device by model and algorithm, as `jrl plan` counts it.

    python -m benchmarks.hardware_plans

Models are planned with one and with two layers: all that grows with the layers grows by the same for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PretrainedConfig

import jrl
from benchmarks.compiled_plans import with_layers
from benchmarks.llama_plans import architecture, columns, figures
from jrl.bench.models import PRESETS
from jrl.mesh import abstract_mesh
from jrl.trainers.plan.run_plan import RunPlan, plan_run

ROWS, MICROBATCH, TOKENS = 32, 4, 512
CARDS = (8, 16, 24, 40, 80, 141)
"""GiB of common accelerators, the smallest first."""
HEADROOM = 0.9
"""Share of a device that a plan may fill: the compiler's workspace is not in it."""


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
    """Prints the table."""
    print("\n".join(table()))


def table() -> Iterator[str]:
    """Lines of the table: GiB at most and, behind it, the smallest card with room to spare."""
    yield f"| model | trained | {' | '.join(METHODS)} |"
    yield f"|{'---|' * (2 + len(METHODS))}"
    for name, model in MODELS.items():
        for trained, frozen_dtype in TRAINED.items():
            sizes = [at_most(model, method, frozen_dtype) for method in METHODS]
            yield f"| {name} | {trained} | {' | '.join(cell(size) for size in sizes)} |"


def at_most(model: Model, method: str, frozen_dtype: str | None) -> float:
    """GiB of one device at its fullest moment; LoRA over a base of this dtype, or, of None, all layers."""
    layers = model.config().num_hidden_layers
    one, two = (figures(plan(model, method, frozen_dtype, count), count) for count in (1, 2))
    whole = {key: one[key] + (layers - 1) * (two[key] - one[key]) for key in one}
    _held, _learning, _sampling, most, *_sent = columns(whole, layers)
    return most


def plan(model: Model, method: str, frozen_dtype: str | None, layers: int) -> RunPlan:
    """One device's run of the model with so many layers."""
    config = with_layers(model.config(), layers)
    sections: dict[str, Any] = {"model_path": config, "num_layers_unfrozen": -1}
    if frozen_dtype is not None:
        adapter = {"peft_type": "LORA", "r": 16, "lora_alpha": 16, "target_modules": list(model.targets)}
        sections |= {"peft_config": adapter, "frozen_dtype": frozen_dtype}
    recipe = METHODS[method]().evolve(
        model=sections,
        train={
            **{"seq_length": TOKENS, "compute_dtype": "bfloat16", "remat": True},
            **{"batch_size": ROWS, "minibatch_size": MICROBATCH},
        },
        method=SAMPLING.get(method, {}),
    )
    return plan_run(recipe, abstract_mesh(1, 1, 1, num_devices=1))


def cell(size: float) -> str:
    """A size and the smallest card that holds it, or that none does."""
    card = next((card for card in CARDS if size <= HEADROOM * card), None)
    return f"{size:.1f} ({'several' if card is None else card})"


if __name__ == "__main__":
    main()
