# SPDX-License-Identifier: Apache-2.0
"""Recipes compiled for absent devices: memory planned from shapes beside what the compilers reserve, and seconds.

    python benchmarks/compiled_plans.py run --layers 2 --target gpu:h100x8 [--recipe ppo_imdb]
    python benchmarks/compiled_plans.py plans --target gpu:h100x8    # plans what is on file again, compiling nothing
    python benchmarks/compiled_plans.py table          # writes docs/compiled.md
    python benchmarks/compiled_plans.py shapes --target gpu:h200     # PPO at 0.5B, 1B and 7B, of 2 and of 3 layers
    python benchmarks/compiled_plans.py seconds        # prints the table of predicted seconds of docs/scaling.md

`run` and `shapes` need the compilers of their targets, `pip install 'jrl-post[plan-gpu]'` or `'jrl-post[plan-tpu]'`,
and no such device. A case that is on file is compiled again if it is older than the programs (`PROGRAMS`). `--layers`
keeps so many layers of a model, at its own widths.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

import jrl
from jrl.bench.models import PRESETS
from jrl.mesh import make_mesh
from jrl.models.cost import format_bytes
from jrl.trainers.config.sections import TrainConfig
from jrl.trainers.plan.compiled import CompiledPlan, compile_run
from jrl.trainers.plan.run_plan import plan_run
from jrl.trainers.plan.targets import Target, parse_target

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
SECONDS = ROOT / "benchmarks" / "results" / "predicted_seconds.jsonl"
PROGRAMS = 5
"""Raised by a change after which recipes compile to other programs. 2: lookups move what is found, not the table.
3: gradients of tied tables are added up in float32. 4: no zeros of a skipped step; on TPUs heads are settled first.
5: no constant as wide as a piece of the vocabulary, no nucleus that nobody wants; GPUs run layers one by one, and
decode by a kernel."""
TARGETS = {
    "tpu:v5e:2x4": (2, 4, 1),
    "tpu:v6e:4x4": (2, 8, 1),
    "tpu:v5p:2x2x2": (1, 4, 2),
    "gpu:h100x8": (2, 4, 1),
    "gpu:h100x16": (2, 4, 2),
    "gpu:h200x4": (1, 4, 1),
}
"""Devices, and the sizes of data, fsdp and tensor on them."""


class Shape(NamedTuple):
    """A PPO run whose seconds are predicted.

    Attributes:
      model: "0.5B" (Qwen2.5), "1B" (Llama 3.2) or "7B" (Llama 2).
      target: Devices.
      sizes: Of data, fsdp and tensor.
      rows: Of a sampling call.
      prompt: Tokens of a prompt.
      response: Tokens of a completion.
      lora: Whether an adapter trains, over a base in bfloat16.
      only: Programs; empty: all.
      chunk_bytes: `train.logprob_chunk_bytes`.
    """

    model: str
    target: str
    sizes: tuple[int, int, int]
    rows: int
    prompt: int = 128
    response: int = 256
    lora: bool = False
    only: tuple[str, ...] = ()
    chunk_bytes: int = TrainConfig.logprob_chunk_bytes


SAMPLES, EPOCHS = 1024, 4  # of an iteration
SHAPES = (
    *(
        Shape(model, target, sizes, SAMPLES)
        for target, sizes in {
            "gpu:h200": (1, 1, 1),
            "gpu:h100x8": (8, 1, 1),
            "tpu:v5e:2x4": (1, 8, 1),
            "tpu:v6e:2x4": (1, 8, 1),
        }.items()
        for model in ("0.5B", "1B")
    ),
    Shape("7B", "gpu:h200", (1, 1, 1), 128, lora=True),
    Shape("7B", "gpu:h100x8", (8, 1, 1), SAMPLES, lora=True),
    Shape("7B", "tpu:v5e:2x4", (1, 1, 8), 128, lora=True),
    Shape("7B", "tpu:v6e:2x4", (8, 1, 1), 256, lora=True),
    Shape("7B", "gpu:h100x8", (1, 8, 1), 512),
    Shape("0.5B", "gpu:h200", (1, 1, 1), SAMPLES, only=("score", "update"), chunk_bytes=2_000_000_000),
    # Decoding alone, as its targets are set.
    Shape("0.5B", "gpu:h200", (1, 1, 1), 256, prompt=256, only=("sample",)),
    Shape("7B", "gpu:h200", (1, 1, 1), 128, prompt=256, lora=True, only=("sample",)),
)


def main() -> None:
    """Compiles what is missing, or writes the page."""
    top = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    top.add_argument("what", choices=["run", "plans", "table", "shapes", "seconds"])
    top.add_argument("--recipe", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    targets = list(dict.fromkeys([*TARGETS, *(shape.target for shape in SHAPES)]))
    top.add_argument("--target", nargs="+", choices=targets, default=targets)
    top.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS), help="of `shapes`")
    top.add_argument("--layers", type=int, help="of each model; default: all, and of `shapes` 2 and 3")
    flags = top.parse_args()
    if flags.what == "seconds":
        print("\n".join(seconds_lines(list(recorded(SECONDS)))))
        return
    if flags.what == "shapes":
        wanted = [shape for shape in SHAPES if shape.target in flags.target and shape.model in flags.model]
        on_file = [(shape_of(row), row["layers"]) for row in recorded(SECONDS)]
        for layers in (2, 3) if flags.layers is None else (flags.layers,):
            for shape in wanted:
                if (shape, layers) not in on_file:
                    predict(shape, layers)
        return
    if flags.what == "table":
        PAGE.write_text(page(list(recorded(RESULTS))), encoding="utf-8")
        return
    if flags.what == "plans":
        rows = list(recorded(RESULTS))
        for row in (row for row in rows if row["target"] in flags.target and row["recipe"] in flags.recipe):
            plan_again(row)
            write_rows(rows)
        return
    done = {case_of(row) for row in recorded(RESULTS) if is_current(row)}
    for target in (name for name in TARGETS if name in flags.target):
        for recipe in flags.recipe:
            if (recipe, target, flags.layers) not in done:
                run(recipe, target, flags.layers)


def recorded(path: Path) -> Iterator[dict[str, Any]]:
    """Cases that are on file."""
    if path.exists():
        yield from map(json.loads, path.read_text(encoding="utf-8").splitlines())


def write_rows(rows: list[dict[str, Any]]) -> None:
    """Puts these cases on file in place of all that were there."""
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def case_of(row: Mapping[str, Any]) -> tuple[str, str, int | None]:
    """Recipe, target and layers of a line in the file."""
    return row["recipe"], row["target"], row["layers"]


def is_current(row: Mapping[str, Any]) -> bool:
    """True where a case was compiled since the programs last changed."""
    return row.get("of_programs", 1) == PROGRAMS


def with_layers(found: Any, layers: int | None) -> Any:
    """A model's configuration, with so many layers of its own."""
    if layers is None:
        return found
    kinds = {"t5": ("num_layers", "num_decoder_layers"), "gpt2": ("n_layer",), "gptj": ("n_layer",)}
    for field in kinds.get(found.model_type, ("num_hidden_layers",)):
        setattr(found, field, layers)
    if found.model_type == "qwen2":
        found.layer_types = found.layer_types[:layers]
    return found


def case(recipe: str, name: str, layers: int | None) -> tuple[jrl.TRLConfig, Target, Mesh]:
    """A recipe with so many layers, and the devices."""
    config = jrl.TRLConfig.load_yaml(ROOT / "configs" / f"{recipe}.yaml")
    model = {"model_path": with_layers(ARCHITECTURES[RECIPES[recipe]](), layers)}
    if layers is not None and config.model.num_layers_unfrozen > layers:
        model["num_layers_unfrozen"] = layers
    config, target = config.evolve(model=model), parse_target(name)
    return config, target, make_mesh(*TARGETS[name], devices=target.devices())


def plan_again(row: dict[str, Any]) -> None:
    """Sets what a case is planned to take."""
    config, _, mesh = case(row["recipe"], row["target"], row["layers"])
    with jax.set_mesh(mesh):
        planned = plan_run(config, mesh.abstract_mesh)
    row["held_planned"] = sum(planned.held.values())
    for name, program in row["programs"].items():
        program["planned"] = planned.program_bytes.get(name)


def run(recipe: str, name: str, layers: int | None) -> None:
    """Compiles the programs of a recipe for a target and puts its line into the file."""
    found = compile_run(*case(recipe, name, layers))
    row = {"recipe": recipe, "target": name, "layers": layers, "of_programs": PROGRAMS, **figures(found)}
    rows = [other for other in recorded(RESULTS) if case_of(other) != case_of(row)]
    write_rows([*rows, row])
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


NOTES = (
    "Why some plans are off:",
    "- Reserved is, on TPUs, what XLA's report on a program's memory has beside its arguments. When the compiler",
    "  refuses a program, it names the sum of that report. The temporary bytes of JAX's `memory_analysis()` are more:",
    "  ILQL of GPT-J on v5e had 13.8 GiB of them while the report had 9.1 GiB, and the compiler accepted the program.",
    "- On-chip memory is 128 MiB on v5e and v6e, 64 MiB on v5p, and nothing is reserved for what lies there. A plan",
    "  takes off the same for every recipe: 84 MiB of a step on v5e and v6e and 8 MiB on v5p, 72, 84 and 28 MiB of a",
    "  sampling call. These are fitted to this page. Small models, T5 above all, have less or more there.",
    "- Plans of DPO on v5e and of `ppo_imdb` on v6e are too low: some arrays lie in both memories at once.",
    "- `rft_imdb`'s sampling on v5e is planned too low. Its prompts go through a kernel; the rest is not known.",
    "- This page has not GPT-2 with all layers. On v5e its SFT and GRPO are planned 16 % low. On v5p `ppo_imdb` is",
    "  planned 2 % low. On v6e `ppo_sentiment` takes 62 MiB, where 25 are planned.",
    "  On 8 H100 SFT is planned 8 % high (`sft_imdb`: 4 %). On 4 H200 GRPO is planned 1 % high.",
    "- GPT-NeoX is planned too high on GPUs: not all kernels of a layer, nor all their gradients, are whole at once.",
    "  On 4 H200 its arrays take 2,391 MiB where they take the most, for which XLA finds places in 3,479.",
    "  T5's PPO has a microbatch that 8 devices do not divide. LoRA's update on 4 H200 has 437 MiB where its arrays",
    "  take the most; XLA does not find places for them in less than 688.",
    "- GPT-J attends by einsums on GPUs here, since JAX compiles cuDNN's kernel for its heads only where the GPU is: a",
    "  run takes less than is reserved.",
)
"""What is known of the cases that are off; behind the summary."""


def summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    """How far plans are from what the compilers reserve, in sentences and a table by kind of device."""
    held = max(abs(row["held_planned"] / row["held"] - 1) for row in rows)
    missing = []
    for target in TARGETS:
        left = set(RECIPES) - {row["recipe"] for row in rows if row["target"] == target}
        names = ", ".join(f"`{name}`" for name in RECIPES if name in left)
        missing += [f"{'all' if len(left) == len(RECIPES) else names} on {target}"] if left else []
    yield (
        f"{len(rows)} of {len(RECIPES) * len(TARGETS)} cases are compiled, {sum(row['fits'] for row in rows)} of which "
        f"fit. What is held is planned within {100 * held:.4f} %."
    )
    older = [row for row in rows if not is_current(row)]
    if older:
        yield f"{len(older)}, marked by a star, are compiled as the code was before; their plans are of now."
    yield "Of what a call takes beside what is held, so many plans are within a fifth of what is reserved (scoring has"
    yield "no plan):"
    yield ""
    columns = ["devices", "program", "plans", "within a fifth", "too low", "too high", "furthest off"]
    columns += ["of older cases, within a fifth"] if older else []
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for kind in ("gpu:h100", "gpu:h200", "tpu:v5e", "tpu:v6e", "tpu:v5p"):
        for name in ("sample", "update"):
            of_kind = [row for row in rows if row["target"].startswith(kind)]
            now, before = (
                [found for row in of_kind if is_current(row) is current for found in plan_error(row, name)]
                for current in (True, False)
            )
            low, high = (sum(sign * off > 0.2 for off, *_ in now) for sign in (-1, 1))
            ends = dict.fromkeys((min(now), max(now))) if now else {}
            furthest = ", ".join(f"`{recipe}` on {target} {100 * off:+.0f} %" for off, recipe, target in ends)
            cells = [kind, name, len(now), len(now) - low - high, low, high, furthest or "-"]
            cells += [f"{sum(abs(off) <= 0.2 for off, *_ in before)} of {len(before)}"] if older else []
            yield f"| {' | '.join(map(str, cells))} |"
    if missing:
        yield ""
        yield f"Not compiled yet: {'; '.join(missing)}."


def plan_error(row: dict[str, Any], name: str) -> Iterator[tuple[float, str, str]]:
    """(how far the plan is off, recipe, target) of a program that has a plan."""
    program = row["programs"].get(name)
    if program is not None and program["planned"] is not None:
        yield program["planned"] / program["reserved"] - 1, row["recipe"], row["target"]


def page(rows: list[dict[str, Any]]) -> str:
    """The page of plans."""
    lines = [
        "# Recipes, compiled for absent devices",
        "",
        "Written by `python benchmarks/compiled_plans.py table` from "
        "[`compiled_plans.jsonl`](../benchmarks/results/compiled_plans.jsonl).",
        "",
        "```bash",
        "jrl plan --config ppo_sentiment --compile gpu:h100x8      # the same for a recipe of yours",
        "```",
        "",
        "Bytes of one device. *Held* is what lies there all the time: by `jrl plan` and, behind the stroke, by the "
        "shapes and places of the compiled",
        "programs' arguments. *Beside it* is what a call takes: planned from shapes, and reserved by the compiler, "
        "which is what counts. Models have their own",
        "widths; where *layers* has a number, so many of their layers. A call takes at least "
        "as long as the longest of three, at the rates of the data sheets: its products, its reads of",
        "weights and cache (sampling alone), and what it sends. Of what it sends, one round of its loops is listed, "
        "from 1 MiB on.",
        "Two cores that compiled had other work, up to six times as much: their seconds are too many.",
        "",
        *summary(rows),
        "",
        *NOTES,
        "",
        "| recipe | layers | target, data x fsdp x tensor | held | program | beside it: planned, reserved "
        "| compiled in, s | a call takes at least | sent in one round |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (list(TARGETS).index(row["target"]), row["recipe"])):
        head = [
            f"`{row['recipe']}`{'' if is_current(row) else ' *'}",
            str(row["layers"] or "all"),
            f"{row['target']}, {' x '.join(map(str, row['mesh'].values()))}",
            f"{format_bytes(row['held_planned'])} / {format_bytes(row['held'])}",
        ]
        for name, program in row["programs"].items():
            planned = "-" if program["planned"] is None else format_bytes(program["planned"])
            sent = ", ".join(
                f"{kind}: {format_bytes(size)}"
                for kind, size in program["sent_a_round"].items()
                if size >= 1 << 20
            )
            beside = f"{planned}, {format_bytes(program['reserved'])}"
            least = max(program["least_seconds"], key=program["least_seconds"].__getitem__)
            milliseconds = 1e3 * program["least_seconds"][least]
            bound = f"{milliseconds:,.{0 if milliseconds >= 10 else 1}f} ms, {least}"
            cells = [*head, name, beside, f"{program['seconds']:.0f}", bound, sent or "-"]
            lines.append(f"| {' | '.join(cells)} |")
            head = [""] * 4
        for name, said in row["too_large"].items():
            lines.append(f"| {' | '.join([*head, name, f'does not fit: {said}'])} | | | |")
    return "\n".join(lines) + "\n"


# Seconds.

MODELS = {
    "0.5B": PRESETS["qwen2-0.5b"].config,
    "1B": PRESETS["llama-1b"].config,
    "7B": ARCHITECTURES["NousResearch/Llama-2-7b-hf"],
}


def shape_of(row: Mapping[str, Any]) -> Shape:
    """The case of a line in the file."""
    found = row["shape"]
    return Shape(**found | {"sizes": tuple(found["sizes"]), "only": tuple(found["only"])})


def predict(shape: Shape, layers: int) -> None:
    """Compiles a run with so many layers and adds a line to the file."""
    adapter = {"peft_type": "LORA", "r": 16, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    config = jrl.default_ppo_config().evolve(
        model={"model_path": with_layers(MODELS[shape.model](), layers), "num_layers_unfrozen": -1}
        | ({"peft_config": adapter, "frozen_dtype": "bfloat16"} if shape.lora else {}),
        train={
            **{"seq_length": shape.prompt + shape.response, "compute_dtype": "bfloat16", "remat": True},
            **{"batch_size": 256, "minibatch_size": 64, "logprob_chunk_bytes": shape.chunk_bytes},
        },
        method={
            **{"chunk_size": shape.rows, "num_rollouts": SAMPLES, "ppo_epochs": EPOCHS},
            "gen_kwargs": {"max_new_tokens": shape.response, "eos_token_id": []},
        },
    )
    target = parse_target(shape.target)
    mesh = make_mesh(*shape.sizes, devices=target.devices())
    found = compile_run(config, target, mesh, only=shape.only)
    programs = {}
    for program in found.programs:
        kernels, memory_bound = program.kernel_seconds(target, found.dtype)
        programs[program.name] = {
            "kernels": kernels,
            "memory_bound": memory_bound,
            "products": program.flops / target.matrix_flops[found.dtype],
            "memory": sum(kernel.num_bytes * kernel.rounds for kernel in program.work) / target.memory_rate,
            "links": program.least_seconds(target, found.dtype)["links"],
            "sent_bytes": program.sent_bytes,
            "flops": program.flops,
            "round_bytes": program.round_bytes or 0,
            "starts": sum(kernel.rounds for kernel in program.work),
            "own_bytes": program.own_bytes,
            "compiled_in": round(program.seconds, 1),
        }
    row = {
        "shape": shape._asdict(),
        "layers": layers,
        "held": found.held_bytes,
        "programs": programs,
        "too_large": dict(found.too_large),
    }
    with SECONDS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)


def whole(shape: Shape, rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Figures of a whole model's programs: every one grows by the same for each layer.

    Those of a call, and in "held" what a device holds.
    """
    found = {row["layers"]: row for row in rows if shape_of(row) == shape}
    two, three = found[2], found[3]
    more = MODELS[shape.model]().num_hidden_layers - 2

    def grown(few: float, many: float) -> float:
        return few + more * (many - few)

    programs = {
        name: {key: grown(few[key], three["programs"][name][key]) for key in few}
        for name, few in two["programs"].items()
    }
    return {**programs, "held": {"bytes": grown(two["held"], three["held"])}}


def seconds_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The tables of predicted seconds: iterations, then decoding alone."""
    compiled = {shape_of(row) for row in rows if row["layers"] == 3}
    shapes = [shape for shape in SHAPES if shape in compiled]
    titles = ("model", "devices: data, fsdp, tensor", "GiB of a device", "sampling", "scoring", "update")
    rates = (
        "iteration, s",
        "samples/s at most",
        "with one epoch",
        "products' share of the update",
        "measured",
    )
    yield f"| {' | '.join((*titles, *rates))} |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for shape in (shape for shape in shapes if not shape.only):
        yield iteration_line(shape, whole(shape, rows))
    yield ""
    titles = ("model, rows, prompt + completion", "devices", "seconds", "for memory", "tokens/s at most")
    yield f"| {' | '.join(titles)} | kernels of a token | measured |"
    yield "|---|---|---|---|---|---|---|"
    for shape in (shape for shape in shapes if shape.only == ("sample",)):
        sample = whole(shape, rows)["sample"]
        cells = [
            f"{name_of(shape)}, {shape.rows}, {shape.prompt} + {shape.response}",
            shape.target,
            f"{sample['kernels']:.2f}",
            f"{sample['memory_bound'] / sample['kernels']:.0%}",
            f"{shape.rows * shape.response / sample['kernels']:,.0f}",
            f"{sample['starts'] / shape.response:.0f}",
            "-",
        ]
        yield f"| {' | '.join(cells)} |"


def iteration_line(shape: Shape, programs: dict[str, dict[str, float]]) -> str:
    """A row of the first table: seconds of all its samples."""
    calls = {"sample": SAMPLES // shape.rows, "score": SAMPLES // shape.rows, "update": 1}
    cells, total = [], 0.0
    for name, count in calls.items():
        found = programs[name]
        seconds = count * max(found["kernels"], found["links"])
        total += seconds
        share = found["memory_bound"] / found["kernels"]
        links = count * found["links"]
        cells.append(
            f"{seconds:.2f} ({share:.0%})" if not links else f"{seconds:.2f} ({share:.0%}; {links:.2f})"
        )
    own = max(programs[name]["own_bytes"] for name in calls)
    update = programs["update"]
    head = [
        name_of(shape),
        f"{shape.target}: {', '.join(map(str, shape.sizes))}",
        f"{(programs['held']['bytes'] + own) / 2**30:.1f}",
    ]
    share = update["products"] / max(update["kernels"], update["links"])
    once = total - seconds * (EPOCHS - 1) / EPOCHS
    cells += [f"{total:.1f}", f"{SAMPLES / total:.0f}", f"{SAMPLES / once:.0f}", f"{share:.0%}", "-"]
    return f"| {' | '.join([*head, *cells])} |"


def name_of(shape: Shape) -> str:
    """The model, and what of it trains."""
    return f"{shape.model}, LoRA" if shape.lora else shape.model


if __name__ == "__main__":
    main()
