# SPDX-License-Identifier: Apache-2.0
"""Target parameters of LoRA: tensors that stack all experts of a layer, named as transformers holds them in memory.

PEFT wraps the module of such a parameter. Where two of one module are adapted its wrappers are nested, the module's
first parameter innermost, and the names in its file tell: `experts.base_layer` is gate and up, `experts` then is down.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from itertools import groupby
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from jrl.models.adapters.config import LoraConfig
from jrl.models.adapters.lora import AdaptedModule, AdaptedProjection
from jrl.models.adapters.memory_names import DOWN, GATE_UP, name_in_memory
from jrl.models.families.base import Entry, Shape, halves

UP = "up_proj"
_UP = re.compile(r"(.*/experts)/up")
_UNMARKED = frozenset(("llama4", "llama4_text"))
"""Families whose parameters lie (E, in, out) without a mark of it, so that PEFT 0.21 takes inputs for outputs."""

_GATED = ("gate", "gate_proj", "up_proj", "down_proj")
_ONCE_LINEAR = MappingProxyType(
    {"mixtral": ("gate", "w1", "w3", "w2")}
    | dict.fromkeys(("deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3_moe", "qwen3_next"), _GATED)
)
"""Families whose experts and routers were linear maps in transformers 4: their ends of names there."""


class StackedParameter(NamedTuple):
    """A parameter that stacks the maps of all experts of a layer.

    Attributes:
      module: That holds it, "model.layers.0.mlp.experts".
      name: "gate_up_proj", of experts without gates "up_proj", or "down_proj".
      shape: (E, in, out).
      parts: The projections that lie in it.
    """

    module: str
    name: str
    shape: Shape
    parts: tuple[AdaptedProjection, ...]

    @property
    def full_name(self) -> str:
        """Name from the top of the model, whose end `target_parameters` holds."""
        return f"{self.module}.{self.name}"


def stacked_parameters(entries: Sequence[Entry], shapes: Mapping[str, Shape]) -> list[StackedParameter]:
    """Parameters that stack experts, layer by layer, in the order in which torch has those of a module.

    Args:
      entries: The model's table of tensors, in which experts are stacked or stand one by one.
      shapes: Of its parameters, by path.
    """
    found = []
    by_path = {path: entry for entry in entries for path in entry.paths}
    for path, entry in by_path.items():
        match = _UP.fullmatch(path)
        if match is None:
            continue
        is_gated = f"{match[1]}/gate" in by_path
        module = f"{name_in_memory(entry.name).partition('.experts.')[0]}.experts"
        count, width, inner = shapes[path]
        rows = {"up": np.arange(inner)}
        if is_gated:
            transform = halves() if entry.index is not None else entry.transform
            gate, up = transform.load(np.arange(2 * inner), [(inner,), (inner,)])
            rows = {"gate": gate, "up": up}
        owner = tuple(match[1].split("/"))
        wide = tuple(AdaptedProjection((*owner, part), (width,), (inner,), own) for part, own in rows.items())
        narrow = AdaptedProjection((*owner, "down"), (inner,), (width,), np.arange(width))
        shape = (count, width, len(rows) * inner)
        found.append(StackedParameter(module, GATE_UP if is_gated else UP, shape, wide))
        found.append(StackedParameter(module, DOWN, (count, inner, width), (narrow,)))
    return found


def adapted_experts(
    config: LoraConfig, parameters: Sequence[StackedParameter], model_type: str
) -> list[AdaptedModule]:
    """The stacked experts that `target_parameters` adapts.

    Args:
      config: The configuration.
      parameters: Of the model, in the order of `stacked_parameters`.
      model_type: Names the family.
    """
    chosen = [each for each in parameters if is_named(config, each.full_name)]
    found = []
    for module, group in groupby(chosen, key=lambda each: each.module):
        for depth, parameter in enumerate(reversed(list(group))):
            count, size_in, size_out = parameter.shape
            swapped = model_type in _UNMARKED
            rank, scale = config.rank_and_scale(parameter.full_name)
            sizes = (size_out, size_in) if swapped else (size_in, size_out)
            name = module + depth * ".base_layer"
            found.append(AdaptedModule(name, *sizes, rank, scale, parameter.parts, False, count, swapped))
    return found


def expand_all_linear(config: LoraConfig, ends: Set[str], model_type: str) -> LoraConfig:
    """Expands "all-linear" for a mixture of experts as PEFT 0.21 does: it means what it meant in transformers 4.

    Where experts and routers were linear maps they are targets still, now by their parameters, and gate and up, which
    are one, have twice the rank and alpha. Dense MLPs whose maps have the same names as the experts' drop out. Of other
    families neither experts nor routers are targets.

    Args:
      config: With "all-linear".
      ends: Last parts of the names of all linear maps.
      model_type: Names the family.
    Raises:
      ValueError: If the configuration asks for what parameters cannot have.
    """
    old = _ONCE_LINEAR.get(model_type)
    if old is None:
        return config
    named = config.target_parameters or ()
    both = rf".*\.{GATE_UP}"
    return replace(
        config,
        target_modules=tuple(sorted(ends - set(old))),
        target_parameters=tuple(dict.fromkeys((*named, "gate.weight", GATE_UP, DOWN))),
        rank_pattern={**config.rank_pattern, both: 2 * config.r},
        alpha_pattern={**config.alpha_pattern, both: 2 * config.lora_alpha},
    )


def is_named(config: LoraConfig, full_name: str) -> bool:
    """True where `target_parameters` holds the name, or its end at a dot."""
    return any(full_name == name or full_name.endswith(f".{name}") for name in config.target_parameters or ())
