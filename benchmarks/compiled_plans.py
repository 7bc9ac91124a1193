# SPDX-License-Identifier: Apache-2.0
"""Recipes compiled for absent devices: memory planned from shapes beside what the compilers reserve.

    python benchmarks/compiled_plans.py run --layers 2 --target gpu:h100x8 [--recipe ppo_imdb]
    python benchmarks/compiled_plans.py table          # writes docs/compiled.md

`run` needs the compilers of its targets, `pip install 'jrl[plan-gpu]'` or `'jrl[plan-tpu]'`, and no such device. A case
that is on file already is not compiled again. `--layers` keeps so many layers of a model, at its own widths: whole
models take hours.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jrl
from jrl.mesh import make_mesh
from jrl.models.cost import format_bytes
from jrl.trainers.plan.compiled import CompiledPlan, compile_run
from jrl.trainers.plan.targets import parse_target

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.recipe_shapes import ARCHITECTURES  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "compiled_plans.jsonl"
PAGE = ROOT / "docs" / "compiled.md"
RECIPES = {
    "ppo_sentiment": "gpt2",
    "ppo_dense_sentiment": "gpt2",
    "ppo_dialogue": "gpt2",
    "ppo_imdb": "lvwerra/gpt2-imdb",
    "ppo_imdb_t5": "lvwerra/t5-imdb",
    "ppo_imdb_llama_7b": "NousResearch/Llama-2-7b-hf",
    "ppo_imdb_llama_7b_lora": "NousResearch/Llama-2-7b-hf",
    "ppo_hh_gptj_6b": "EleutherAI/gpt-j-6b",
    "ppo_hh_neox_20b": "EleutherAI/gpt-neox-20b",
    "ppo_summarize_gptj_6b": "EleutherAI/gpt-j-6b",
    "ppo_summarize_t5": "google-t5/t5-small",
    "grpo_arithmetic": "gpt2",
    "ilql_sentiment": "gpt2",
    "ilql_hh_gptj_6b": "EleutherAI/gpt-j-6b",
    "rft_imdb": "lvwerra/gpt2-imdb",
    "sft_sentiment": "gpt2",
    "sft_imdb": "gpt2",
    "sft_hh_gptj_6b": "EleutherAI/gpt-j-6b",
    "sft_summarize_t5": "google-t5/t5-small",
    "dpo_chain": "gpt2",
}
"""Recipes, and the models whose architecture they are compiled with."""
TARGETS = {
    "tpu:v5e:2x4": (2, 4, 1),
    "tpu:v6e:4x4": (2, 8, 1),
    "tpu:v5p:2x2x2": (1, 4, 2),
    "gpu:h100x8": (2, 4, 1),
    "gpu:h100x16": (2, 4, 2),
    "gpu:h200x4": (1, 4, 1),
}
"""Devices, and the sizes of data, fsdp and tensor on them."""


def main() -> None:
    """Compiles what is missing, or writes the page."""
    top = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    top.add_argument("what", choices=["run", "table"])
    top.add_argument("--recipe", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    top.add_argument("--target", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    top.add_argument("--layers", type=int, help="of each model; default: all")
    flags = top.parse_args()
    if flags.what == "table":
        PAGE.write_text(page(list(recorded())), encoding="utf-8")
        return
    done = {(row["recipe"], row["target"], row["layers"]) for row in recorded()}
    for target in flags.target:
        for recipe in flags.recipe:
            if (recipe, target, flags.layers) not in done:
                run(recipe, target, flags.layers)


def recorded() -> Iterator[dict[str, Any]]:
    """Cases that are on file."""
    if RESULTS.exists():
        yield from map(json.loads, RESULTS.read_text(encoding="utf-8").splitlines())


def architecture(name: str, layers: int | None) -> Any:
    """A model's configuration, with so many layers of its own."""
    found = ARCHITECTURES[name]()
    if layers is None:
        return found
    kinds = {"t5": ("num_layers", "num_decoder_layers"), "gpt2": ("n_layer",), "gptj": ("n_layer",)}
    for field in kinds.get(found.model_type, ("num_hidden_layers",)):
        setattr(found, field, layers)
    return found


def run(recipe: str, name: str, layers: int | None) -> None:
    """Compiles the programs of a recipe for a target and adds a line to the file."""
    config = jrl.TRLConfig.load_yaml(ROOT / "configs" / f"{recipe}.yaml")
    model = {"model_path": architecture(RECIPES[recipe], layers)}
    if layers is not None and config.model.num_layers_unfrozen > layers:
        model["num_layers_unfrozen"] = layers
    config, target = config.evolve(model=model), parse_target(name)
    mesh = make_mesh(*TARGETS[name], devices=target.devices())
    found = compile_run(config, target, mesh)
    row = {"recipe": recipe, "target": name, "layers": layers, **figures(found)}
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)


def figures(found: CompiledPlan) -> dict[str, Any]:
    """What is kept of a plan: bytes of one device, and what goes over links."""
    planned = found.planned.program_bytes
    programs = {}
    for program in found.programs:
        sent = Counter[str]()
        for one in program.collectives:
            sent[f"{one.kind} over {'+'.join(sorted(one.axes))}"] += one.sent_bytes
        programs[program.name] = {
            "arguments_by_shapes": program.held_bytes + program.given_bytes,
            "arguments": program.argument_bytes,
            "planned": planned.get(program.name),
            "reserved": program.own_bytes,
            "seconds": round(program.seconds, 1),
            "sent_a_round": dict(sent),
            "least_seconds": program.least_seconds(found.target, found.dtype),
        }
    return {
        "mesh": dict(found.planned.mesh),
        "held": found.held_bytes,
        "held_planned": sum(found.planned.held.values()),
        "total": found.total,
        "fits": found.fits,
        "too_large": dict(found.too_large),
        "programs": programs,
    }


def page(rows: list[dict[str, Any]]) -> str:
    """The page of plans."""
    lines = [
        "# Recipes, compiled for absent devices",
        "",
        "Written by `python benchmarks/compiled_plans.py table` from "
        "[`compiled_plans.jsonl`](../benchmarks/results/compiled_plans.jsonl).",
        "",
        "Bytes of one device. *Held* is what lies there all the time: by `jrl plan` and, behind the stroke, by the "
        "shapes and places of the compiled",
        "programs' arguments. *Beside it* is what a call takes: planned from shapes, and reserved by the compiler, "
        "which is what counts. Models have their own",
        "widths; where *layers* has a number, so many of their layers. A call takes at least "
        "as long as the longest of its products, its reads of",
        "weights and cache (sampling alone), and what it sends, at the rates of the data sheets.",
        "",
        "| recipe | layers | target, data x fsdp x tensor | held | program | beside it: planned, reserved "
        "| compiled in, s | a call takes at least | sent in one round |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (list(TARGETS).index(row["target"]), row["recipe"])):
        head = [
            f"`{row['recipe']}`",
            str(row["layers"] or "all"),
            f"{row['target']}, {' x '.join(map(str, row['mesh'].values()))}",
            f"{format_bytes(row['held_planned'])} / {format_bytes(row['held'])}",
        ]
        for name, program in row["programs"].items():
            planned = "-" if program["planned"] is None else format_bytes(program["planned"])
            sent = ", ".join(
                f"{kind}: {format_bytes(size)}" for kind, size in program["sent_a_round"].items()
            )
            beside = f"{planned}, {format_bytes(program['reserved'])}"
            least = max(program["least_seconds"], key=program["least_seconds"].__getitem__)
            bound = f"{1e3 * program['least_seconds'][least]:.2g} ms, {least}"
            cells = [*head, name, beside, f"{program['seconds']:.0f}", bound, sent or "-"]
            lines.append(f"| {' | '.join(cells)} |")
            head = [""] * 4
        for name, said in row["too_large"].items():
            lines.append(f"| {' | '.join([*head, name, f'does not fit: {said}'])} | | | |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
