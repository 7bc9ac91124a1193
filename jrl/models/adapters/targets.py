# SPDX-License-Identifier: Apache-2.0
"""Target modules of LoRA: names are matched as PEFT matches them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from jrl.models.adapters.config import CAUSAL, SEQ2SEQ, AdapterConfig, LoraConfig
from jrl.models.adapters.lora import AdaptedModule, AdaptedProjection, Lora
from jrl.models.adapters.memory_names import name_in_memory
from jrl.models.adapters.target_parameters import (
    StackedParameter,
    adapted_experts,
    expand_all_linear,
    is_named,
    stacked_parameters,
)
from jrl.models.families import find_family
from jrl.models.families.base import Entry, Shape

DEFAULT_TARGETS: Mapping[str, tuple[str, ...] | str] = {
    **dict.fromkeys(("t5", "mt5", "umt5"), ("q", "v")),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), ("c_attn",)),
    **dict.fromkeys(("bloom", "gpt_neox"), ("query_key_value",)),
    **dict.fromkeys(("opt", "gptj", "gpt_neo", "llama", "mistral", "mixtral"), ("q_proj", "v_proj")),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "qwen2", "qwen3"), ("q_proj", "v_proj")),
    **dict.fromkeys(("olmo2", "smollm3", "qwen3_moe"), ("q_proj", "v_proj")),
    "glm4_moe": ("q_proj", "v_proj"),
    "phi3": ("qkv_proj",),
    # Of latent attention, and of layers without attention, what makes queries and values.
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite"), ("q_proj", "q_b_proj", "kv_b_proj")),
    "kimi_linear": ("q_proj", "v_proj", "q_b_proj", "kv_b_proj"),
    "qwen3_next": ("q_proj", "v_proj", "in_proj_qkvz"),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), ("q_proj", "v_proj", "in_proj_qkv")),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), ("q_proj", "v_proj", "in_proj_qkv")),
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid", "lfm2"), ("q_proj", "v_proj", "in_proj")),
    "jamba": ("q_proj", "v_proj", "in_proj"),
    "nemotron_h": ("q_proj", "k_proj", "v_proj", "o_proj"),
    **dict.fromkeys(("arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "glm4"), ("q_proj", "v_proj")),
    **dict.fromkeys(
        ("gpt_oss", "granite", "hunyuan_v1_dense", "ministral", "ministral3"), ("q_proj", "v_proj")
    ),
    **dict.fromkeys(("nemotron", "olmo3", "phi", "qwen2_moe", "seed_oss"), ("q_proj", "v_proj")),
    **dict.fromkeys(("stablelm", "starcoder2"), ("q_proj", "v_proj")),
    **dict.fromkeys(("llama4", "llama4_text"), ("q_proj", "v_proj")),
    **dict.fromkeys(("gemma3", "gemma4_text", "mistral3", "qwen2_5_vl", "qwen3_vl"), ("q_proj", "v_proj")),
    # In torch the eyes have modules of these names that PEFT cannot adapt.
    "gemma4": r".*language_model\..*\.(q_proj|v_proj)",
    "falcon": ("query_key_value",),
    **dict.fromkeys(("bert", "roberta"), ("query", "value")),
    "distilbert": ("q_lin", "v_lin"),
}
"""What PEFT 0.21 adapts where `target_modules` is not given. For `olmo2`, `smollm3`, `qwen3_moe`, `umt5`, `distilbert`
and all families without plain attention it has no default; theirs are the projections that play the same part."""
HEAD = "lm_head"
UNADAPTED: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("falcon_h1", "nemotron_h"),
            ("out_proj", "PEFT refuses an adapter of it, because torch's kernels pass it by"),
        ),
        "jamba": ("dt_proj", "torch reads its weight past an adapter, which would act here alone"),
    }
)
"""By family the module whose weight torch reads past an adapter, and why it has none."""


def check_task(config: AdapterConfig, model_type: str) -> None:
    """Refuses an adapter that names a task of other models than this language model.

    Raises:
      ValueError: If it was made for a decoder and this is none, or the reverse, or for a classifier.
    """
    own = SEQ2SEQ if find_family(model_type).kind == "seq2seq" else CAUSAL
    if config.task_type not in (None, own):
        raise ValueError(
            f"peft_config: `task_type` must be {own} for a {model_type} model; got {config.task_type!r}: the adapter "
            "is meant for another kind of model."
        )


def check_maps_alone(config: LoraConfig, kind: str, *, modules: bool = False) -> None:
    """Refuses what only language models train beside the updates of maps.

    Args:
      config: The configuration.
      kind: Of the model, for the error.
      modules: The caller keeps the modules of `modules_to_save`, and checks their names.
    Raises:
      ValueError: If it asks for rows of tokens, or for whole modules that nobody keeps.
    """
    asked = {
        "trainable_token_indices": config.trainable_token_indices,
        "modules_to_save": None if modules else config.modules_to_save,
    }
    for name, value in asked.items():
        if value is not None:
            raise ValueError(f"peft_config: `{name}` must be off for a {kind}, got {value!r}.")


def bind_lora(
    config: LoraConfig, entries: Sequence[Entry], shapes: Mapping[str, Shape], model_type: str
) -> Lora:
    """Finds what a configuration adapts in a model.

    Args:
      config: The configuration.
      entries: The model's table of tensors.
      shapes: Of its parameters, by path.
      model_type: Names the family whose default targets apply.
    Raises:
      ValueError: If nothing matches, or something does that is no linear map, or that PEFT does not adapt.
    """
    stacked = stacked_parameters(entries, shapes)
    if stacked and _is_all_linear(config.target_modules):
        maps = (_module(entry) for entry in entries if _is_target(config, "all-linear", entry))
        config = expand_all_linear(config, {name.rsplit(".", 1)[-1] for name in maps}, model_type)
    targets = config.target_modules
    if targets is None and config.target_parameters:
        targets = ()
    if targets is None:
        if model_type not in DEFAULT_TARGETS:
            ends = sorted({_module(entry).rsplit(".", 1)[-1] for entry in entries if _is_linear(entry)})
            raise ValueError(
                f"peft_config: `target_modules` has no default for {model_type}; name some of {', '.join(ends)}, or "
                '"all-linear".'
            )
        targets = DEFAULT_TARGETS[model_type]
    unadapted = UNADAPTED.get(model_type)
    found = []
    for entry in entries:
        if not entry.name.endswith(".weight") or not _is_target(config, targets, entry):
            continue
        if unadapted is not None and matches(unadapted[:1], _module(entry)):
            raise ValueError(
                f"peft_config: `target_modules` {targets!r} must leave out {_module(entry)}: {unadapted[1]}. Name "
                f'others, or add `exclude_modules: ["{unadapted[0]}"]`.'
            )
        if not _is_linear(entry):
            raise ValueError(
                f"peft_config: `target_modules` matches {_module(entry)}, which is no linear map of its own (an "
                "embedding, a norm, or one of several stacked experts); LoRA adapts linear maps. Experts are named in "
                "`target_parameters`, as in experts.down_proj."
            )
        found.append(_adapted(config, entry, shapes))
    found += adapted_experts(config, stacked, model_type)
    found += _adapted_routers(config, stacked, entries, shapes, model_type)
    twice = [name for name, count in Counter(module.name for module in found).items() if count > 1]
    if twice:
        raise ValueError(
            f"peft_config: {twice[0]} must be adapted once, got it in `target_modules` and, by its weight, in "
            "`target_parameters`: leave it out of one."
        )
    tied_head = (
        isinstance(targets, tuple)
        and HEAD in targets
        and not any(e.name == f"{HEAD}.weight" for e in entries)
    )
    if tied_head:
        raise ValueError(
            f"peft_config: `target_modules` names {HEAD}, which this model does not have: its head is tied to the "
            "embedding."
        )
    if not found and not config.trains_tokens_alone:
        raise ValueError(
            f"peft_config: `target_modules` {targets!r} matches no module of this {model_type} model; its modules are "
            f"called {_module(entries[0])}, ..., {_module(entries[-1])}."
        )
    return Lora(config, tuple(found))


def modules_of(entries: Sequence[Entry]) -> dict[str, tuple[Entry, ...]]:
    """All modules of a model, as transformers holds them: name → tensors below it."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        steps = name_in_memory(entry.name).split(".")
        for depth in range(1, len(steps)):
            found.setdefault(".".join(steps[:depth]), []).append(entry)
    return {module: tuple(below) for module, below in found.items()}


def _module(entry: Entry) -> str:
    return name_in_memory(entry.name.removesuffix(".weight").removesuffix(".bias"))


def _is_linear(entry: Entry) -> bool:
    return entry.transform.input_axes > 0 and entry.index is None


def _is_target(config: LoraConfig, targets: tuple[str, ...] | str, entry: Entry) -> bool:
    name = _module(entry)
    if config.exclude_modules is not None and matches(config.exclude_modules, name):
        return False
    # As in PEFT, what is saved whole has no adapter, nor has what lies in it.
    if any(re.match(rf"(^|.*\.){whole}($|\..*)", name) for whole in config.modules_to_save or ()):
        return False
    if _is_all_linear(targets):
        path = entry.paths[0]
        # Routers are no linear maps in torch, but for Gemma 4's, which is one inside of its router.
        is_map = "/experts/router/" not in path or entry.name.endswith(".router.proj.weight")
        return _is_linear(entry) and is_map and not path.startswith(f"{HEAD}/")
    # As in PEFT, layers are chosen among names only: a pattern says for itself which layers it means.
    chosen = isinstance(targets, str) or name in targets or _in_layers(config, name)
    return matches(targets, name) and chosen


def _is_all_linear(targets: tuple[str, ...] | str | None) -> bool:
    return isinstance(targets, str) and targets.lower() == "all-linear"


def matches(patterns: tuple[str, ...] | str, name: str) -> bool:
    """True for a module's name that a pattern describes, or that names hold, or its end at a dot, as in PEFT."""
    if isinstance(patterns, str):
        try:
            return re.fullmatch(patterns, name) is not None
        except re.error as error:
            raise ValueError(
                f"peft_config: {patterns!r} must be a pattern of whole module names (a regular expression): {error}."
            ) from error
    return any(name == pattern or name.endswith(f".{pattern}") for pattern in patterns)


def _in_layers(config: LoraConfig, name: str) -> bool:
    if not config.layers_to_transform:
        return True
    lists = config.layers_pattern or (r"[^.]*",)
    prefix = r"(?:^|.*?\.)" if config.layers_pattern else r".*?\."
    matches = [re.match(rf"{prefix}{pattern}\.(\d+)\.", name) for pattern in lists]
    return any(int(match[1]) in config.layers_to_transform for match in matches if match)


def _adapted_routers(
    config: LoraConfig,
    stacked: Sequence[StackedParameter],
    entries: Sequence[Entry],
    shapes: Mapping[str, Shape],
    model_type: str,
) -> list[AdaptedModule]:
    """Routers that `target_parameters` names by their weights; refuses names that are neither theirs nor experts'."""
    routers = {
        f"{_module(entry)}.weight": entry
        for entry in entries
        if entry.paths[0].endswith("/experts/router/kernel")
    }
    known = [*(each.full_name for each in stacked), *routers]
    for name in config.target_parameters or ():
        if not any(each == name or each.endswith(f".{name}") for each in known):
            hint = f"the first of them is {known[0]}, the last {known[-1]}" if known else "it has none"
            raise ValueError(
                f"peft_config: `target_parameters` names {name!r}, which must be the end of a parameter that stacks "
                f"experts, or of the weight of a router; in this {model_type} model {hint}. Name linear maps in "
                "`target_modules`."
            )
    found = []
    for full_name, entry in routers.items():
        if is_named(config, full_name):
            rank, scale = config.rank_and_scale(full_name)
            name = full_name.removesuffix(".weight")
            found.append(replace(_adapted(config, entry, shapes), name=name, rank=rank, scale=scale))
    return found


def _adapted(config: LoraConfig, entry: Entry, shapes: Mapping[str, Shape]) -> AdaptedModule:
    name, transform = _module(entry), entry.transform
    size_in, size_out = entry.shape if transform.inputs_first else entry.shape[::-1]
    kernels = [shapes[path] for path in entry.paths]
    inputs = [shape[: transform.input_axes] for shape in kernels]
    outputs = [shape[transform.input_axes :] for shape in kernels]
    # A weight with one input whose entries are its own row numbers, from 1: loading it tells where each row goes.
    numbers = np.arange(1, size_out + 1)
    numbers = numbers[None, :] if transform.inputs_first else numbers[:, None]
    ones = (1,) * transform.input_axes
    loaded = transform.load(numbers, [(*ones, *shape) for shape in outputs])
    parts = tuple(
        AdaptedProjection(tuple(path.split("/")[:-1]), size, shape, rows.reshape(-1) - 1)
        for path, size, shape, rows in zip(entry.paths, inputs, outputs, loaded, strict=True)
    )
    rank, scale = config.rank_and_scale(name)
    return AdaptedModule(name, size_in, size_out, rank, scale, parts, transform.inputs_first)
