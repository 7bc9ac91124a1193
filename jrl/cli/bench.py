# SPDX-License-Identifier: Apache-2.0
"""`jrl bench`: how fast a model samples, is scored and learns here, one JSON line a benchmark."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

WHAT = ("decode", "score", "update", "ppo_iteration", "dpo_step", "sft_step")
"""Every benchmark, by name."""
_DTYPES = ("float32", "bfloat16")
_SHAPES = {
    "rows": "rollouts of an iteration, rows sampled or scored at once, rows or pairs of an SFT or DPO step",
    "prompt": "tokens of a prompt",
    "response": "tokens of a completion",
    "epochs": "passes of PPO over its rollouts",
    "batch_size": "rollouts of one of PPO's optimizer steps",
    "minibatch_size": "rows of one forward pass",
    "logprob_chunk_bytes": "most bytes of logits held at a time",
}


def add_flags(command: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    command.add_argument(
        "--model", required=True, metavar="DIRECTORY_OR_PRESET", help="checkpoint, or a name of known shapes"
    )
    command.add_argument(
        "--what",
        default="decode,score,update",
        metavar="NAMES",
        help=f"of {','.join(WHAT)}; default: %(default)s",
    )
    _add_common_flags(command)


def _add_common_flags(command: argparse.ArgumentParser) -> None:
    """The flags that every benchmark has, but for the model and what is measured."""
    for name, what in _SHAPES.items():
        command.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=what)
    command.add_argument(
        "--rounds", type=int, default=5, help="calls after the first; the median is reported"
    )
    command.add_argument("--compute-dtype", choices=_DTYPES, help="default: the preset's; float32")
    command.add_argument(
        "--num-layers-unfrozen", type=int, default=-1, metavar="N", help="last layers that train; -1: all"
    )
    command.add_argument(
        "--lora-rank", type=int, default=0, metavar="R", help="an adapter trains instead; 0: none"
    )
    command.add_argument("--frozen-dtype", choices=_DTYPES, default="float32", help="of what does not train")
    command.add_argument("--remat", action="store_true", help="compute layers again in the backward pass")
    command.add_argument(
        "--attn-implementation",
        choices=("auto", "einsum", "xla", "cudnn", "splash"),
        default="auto",
        help="how scoring and training attend",
    )


def prepare(flags: argparse.Namespace, overrides: Sequence[str]) -> Callable[[], None]:
    """`jrl bench`: prints the records of the benchmarks that were asked for.

    Raises:
      ValueError: On an unknown flag or benchmark, a number below 1, or a model that cannot be measured.
    """
    if overrides:
        raise ValueError(f"unknown flags {list(overrides)}.")
    names = flags.what.split(",")
    unknown = [name for name in names if name not in WHAT]
    if unknown:
        raise ValueError(
            f"--what must name some of {', '.join(WHAT)}, with commas between, got {unknown[0]!r}."
        )
    for name in (*_SHAPES, "rounds"):
        value = vars(flags)[name]
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}.")
    # They bring transformers' model configurations along, which the other commands do without.
    from jrl.bench.models import PRESETS, Options, Shapes, find_subject
    from jrl.bench.suite import run_benchmark

    preset = PRESETS.get(flags.model)
    options = Options(
        compute_dtype=flags.compute_dtype or (preset.compute_dtype if preset else "float32"),
        num_layers_unfrozen=flags.num_layers_unfrozen,
        lora_rank=flags.lora_rank,
        frozen_dtype=flags.frozen_dtype,
        remat=flags.remat,
        attn_implementation=flags.attn_implementation,
    )
    given: dict[str, Any] = {name: vars(flags)[name] for name in _SHAPES if vars(flags)[name] is not None}
    shapes = replace(preset.shapes if preset else Shapes(), **given)
    if shapes.batch_size % shapes.minibatch_size:
        raise ValueError(
            f"--minibatch-size must divide --batch-size = {shapes.batch_size}, got {shapes.minibatch_size}."
        )
    subject = find_subject(flags.model, options)

    def work() -> None:
        for name in names:
            print(json.dumps(run_benchmark(name, subject, shapes, rounds=flags.rounds)), flush=True)

    return work


def run_script(name: str, doc: str | None) -> None:
    """Runs a script of `benchmarks/`: a single benchmark, of a preset unless another model is named.

    Args:
      name: Of `WHAT`.
      doc: Of the script; its first line describes it.
    """
    top = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    top.add_argument(
        "--model", default="gpt2-124m", help="preset, or folder or hub id of a checkpoint; default: gpt2-124m"
    )
    _add_common_flags(top)
    top.set_defaults(what=name)
    prepare(top.parse_args(), [])()
