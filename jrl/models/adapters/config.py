# SPDX-License-Identifier: Apache-2.0
"""Configurations of adapters, read from the dict that trlX takes and that PEFT stores as `adapter_config.json`.

Names and defaults are PEFT's. Keys that say nothing here (base model, versions) pass; keys of features that
jrl lacks pass while they are off.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from enum import Enum
from typing import Any, Literal

from jrl.models.adapters.field_types import TYPES
from jrl.suggestions import did_you_mean

TOKENS = "TRAINABLE_TOKENS"
CAUSAL, SEQ2SEQ, SEQ_CLS = "CAUSAL_LM", "SEQ_2_SEQ_LM", "SEQ_CLS"
# Said elsewhere (base model), derived from the model (layout, sizes), or of no consequence (versions).
_SILENT = {
    "auto_mapping",
    "base_model_name_or_path",
    "fan_in_fan_out",
    "inference_mode",
    "megatron_core",
    "num_attention_heads",
    "num_layers",
    "num_transformer_submodules",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "runtime_config",
    "token_dim",
    "tokenizer_kwargs",
    "tokenizer_name_or_path",
}
# Features of PEFT that jrl lacks: accepted while they are off.
_OFF = {
    "alora_invocation_tokens",
    "arrow_config",
    "bias",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "kasa_config",
    "layer_replication",
    "loftq_config",
    "lora_bias",
    "lora_ga_config",
    "megatron_config",
    "modules_to_save",
    "monteclora_config",
    "trainable_token_indices",
    "use_bdlora",
    "use_qalora",
    "velora_config",
}


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank updates of chosen linear maps: W + s·B·A (Hu et al. 2021, arXiv:2106.09685).

    Attributes:
      r: Rank.
      lora_alpha: The scale s is alpha / r.
      lora_dropout: Rate on the input of A; acts only where a dropout key is given, which RL and SFT never do.
      target_modules: Ends of module names of the checkpoint, one pattern for a whole name, "all-linear" (every
        linear map but the head; of a mixture of experts see `expand_all_linear`), or None for PEFT's choice for the
        family, which is none under `target_parameters`.
      target_parameters: Ends of names of parameters that stack the experts of a layer, as transformers holds them
        ("experts.gate_up_proj"), and of weights of their routers ("mlp.gate.weight"); None: none. Neither
        `exclude_modules` nor `layers_to_transform` acts on them, as in PEFT.
      exclude_modules: Like `target_modules`; what it names is left out.
      layers_to_transform: Indices of the layers to adapt; None: all.
      layers_pattern: Name of the list of layers in module names; None: the first list found.
      rank_pattern: Pattern of module names → rank of its own.
      alpha_pattern: Pattern of module names → alpha of its own.
      use_rslora: The scale is alpha / √r (Kalajdzievski 2023, arXiv:2312.03732).
      use_dora: The updated weight gets a trained norm for each output (Liu et al. 2024, arXiv:2402.09353).
      init_lora_weights: True: A is uniform in ±1/√in; "gaussian": normal with deviation 1/r. B is 0 in both. False: A
        as for True, and B uniform in ±1/√r, so that the policy does not start as the base model.
      task_type: PEFT's name of what the base model does, checked where the adapter is bound; no part of what it is.
      modules_to_save: Ends of names of modules whose copies train whole beside the adapter. A classifier's head is
        saved whether it is named or not.
      trainable_token_indices: Ids whose rows of the embedding train, of a tied head too; or ends of names of embedding
        and head → ids. With an empty `target_modules` nothing else trains: PEFT's TRAINABLE_TOKENS.
    """

    r: int = 8
    lora_alpha: float = 8
    lora_dropout: float = 0.0
    target_modules: tuple[str, ...] | str | None = None
    exclude_modules: tuple[str, ...] | str | None = None
    layers_to_transform: tuple[int, ...] | None = None
    layers_pattern: tuple[str, ...] | None = None
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    use_rslora: bool = False
    use_dora: bool = False
    init_lora_weights: Literal[True, False, "gaussian"] = True
    target_parameters: tuple[str, ...] | None = None
    task_type: str | None = field(default=None, compare=False, repr=False, kw_only=True)
    modules_to_save: tuple[str, ...] | None = None
    trainable_token_indices: tuple[int, ...] | Mapping[str, tuple[int, ...]] | None = None

    def __post_init__(self) -> None:
        """Raises ValueError on ranks and rates out of range."""
        for rank in (self.r, *self.rank_pattern.values()):
            _require(rank >= 1, "r", "at least 1", rank)
        _require(0.0 <= self.lora_dropout < 1.0, "lora_dropout", "in [0, 1)", self.lora_dropout)
        _require(
            self.init_lora_weights in (True, False, "gaussian"),
            "init_lora_weights",
            'true, false or "gaussian"',
            self.init_lora_weights,
        )
        for name, is_off in (("lora_dropout", not self.lora_dropout), ("use_dora", not self.use_dora)):
            _require(
                is_off or not self.target_parameters,
                name,
                'off under `target_parameters`, which "all-linear" sets for mixtures of experts, as in PEFT: the '
                "update of a parameter is no layer of its own",
                self.lora_dropout if name == "lora_dropout" else self.use_dora,
            )
        self._check_tokens()

    def _check_tokens(self) -> None:
        given = self.trainable_token_indices
        if given is None:
            return
        lists = list(given.values()) if isinstance(given, Mapping) else [given]
        is_sound = lists and all(ids and len(set(ids)) == len(ids) and min(ids) >= 0 for ids in lists)
        _require(bool(is_sound), "trainable_token_indices", "ids of tokens, each once", given)
        if self.trains_tokens_alone:
            _require(
                all(ids == lists[0] for ids in lists),
                "trainable_token_indices",
                "the same ids for all modules under TRAINABLE_TOKENS",
                given,
            )
            _require(
                not self.modules_to_save,
                "modules_to_save",
                "off under TRAINABLE_TOKENS",
                self.modules_to_save,
            )

    @property
    def trains_tokens_alone(self) -> bool:
        """True where rows of tokens train and no map is adapted: TRAINABLE_TOKENS to PEFT, whose LORA needs maps."""
        adapts = self.target_modules != () or bool(self.target_parameters)
        return self.trainable_token_indices is not None and not adapts

    def rank_and_scale(self, name: str) -> tuple[int, float]:
        """Rank and scale of the update of a module, or of a parameter."""
        rank = _of_pattern(self.rank_pattern, name, self.r)
        alpha = _of_pattern(self.alpha_pattern, name, self.lora_alpha)
        return rank, float(alpha / (math.sqrt(rank) if self.use_rslora else rank))


@dataclass(frozen=True)
class PrefixConfig:
    """Trained keys and values before every row, in every layer (Li and Liang 2021, arXiv:2101.00190).

    Attributes:
      num_virtual_tokens: V, columns of the prefix.
      prefix_projection: Trains V embeddings and an MLP that makes the keys and values from them.
      encoder_hidden_size: Inner width of that MLP; None: the model's width.
      init_weights: "zero" starts at keys and values of 0; None: normal with deviation 1, as PEFT does.
      task_type: PEFT's name of what the base model does, checked where the adapter is bound; no part of what it is.
    """

    num_virtual_tokens: int
    prefix_projection: bool = False
    encoder_hidden_size: int | None = None
    init_weights: Literal["zero"] | None = None
    task_type: str | None = field(default=None, compare=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        """Raises ValueError without a virtual token, on an empty MLP, or a start that is unknown."""
        _require(self.num_virtual_tokens >= 1, "num_virtual_tokens", "at least 1", self.num_virtual_tokens)
        inner = self.encoder_hidden_size
        _require(inner is None or inner >= 1, "encoder_hidden_size", "at least 1", inner)
        _require(self.init_weights in (None, "zero"), "init_weights", 'None or "zero"', self.init_weights)


@dataclass(frozen=True)
class PromptConfig:
    """Trained embeddings before every row (Lester et al. 2021, arXiv:2104.08691).

    Attributes:
      num_virtual_tokens: V, columns of the prompt.
      prompt_tuning_init: RANDOM: normal with deviation 1, as PEFT does; TEXT: the embeddings of a text, repeated or
        cut to V; SAMPLE_VOCAB: those of V random tokens.
      prompt_tuning_init_text: That text.
      text_ids: Its ids, filled in by whoever has the tokenizer; no key of PEFT's.
      task_type: PEFT's name of what the base model does, checked where the adapter is bound; no part of what it is.
    """

    num_virtual_tokens: int
    prompt_tuning_init: Literal["RANDOM", "TEXT", "SAMPLE_VOCAB"] = "RANDOM"
    prompt_tuning_init_text: str | None = None
    text_ids: tuple[int, ...] = ()
    task_type: str | None = field(default=None, compare=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        """Raises ValueError without a virtual token, or without the text that TEXT asks for."""
        _require(self.num_virtual_tokens >= 1, "num_virtual_tokens", "at least 1", self.num_virtual_tokens)
        kinds = ("RANDOM", "TEXT", "SAMPLE_VOCAB")
        _require(
            self.prompt_tuning_init in kinds,
            "prompt_tuning_init",
            f"one of {', '.join(kinds)}",
            self.prompt_tuning_init,
        )
        _require(
            self.prompt_tuning_init != "TEXT" or bool(self.prompt_tuning_init_text),
            "prompt_tuning_init_text",
            "given where `prompt_tuning_init` is TEXT",
            self.prompt_tuning_init_text,
        )


AdapterConfig = LoraConfig | PrefixConfig | PromptConfig
KINDS: Mapping[str, type[AdapterConfig]] = {
    "LORA": LoraConfig,
    "PREFIX_TUNING": PrefixConfig,
    "PROMPT_TUNING": PromptConfig,
}


def read_adapter_config(given: Any) -> AdapterConfig:
    """The adapter that a dict, or a PEFT config object, describes.

    Args:
      given: A mapping with `peft_type` and that type's keys, or an object whose `to_dict()` gives one.
    Raises:
      ValueError: If the type, a key or a value is unknown; the message names it.
    """
    if isinstance(given, AdapterConfig):
        return given
    values = plain_peft_config(given)
    kind = str(values.get("peft_type"))
    if kind not in (*KINDS, TOKENS):
        raise ValueError(
            f"peft_config: `peft_type` must be one of {', '.join((*KINDS, TOKENS))}; got {kind!r}."
        )
    if kind == TOKENS:
        kind, values = "LORA", _tokens_alone(values)
    elif kind == "LORA" and values.get("target_modules") in ([], ()):
        _require(
            bool(values.get("target_parameters")),
            "target_modules",
            f"names of maps; tokens train without any under `peft_type: {TOKENS}`",
            values["target_modules"],
        )
    task = values.get("task_type")
    if task not in (None, CAUSAL, SEQ2SEQ, SEQ_CLS):
        raise ValueError(f"peft_config: `task_type` must be {CAUSAL}, {SEQ2SEQ} or {SEQ_CLS}; got {task!r}.")
    known = {entry.name: entry for entry in fields(KINDS[kind]) if entry.name != "text_ids"}
    arguments = {}
    for key, value in values.items():
        if key in known:
            if value is not None:
                _require(TYPES[key].holds(value), key, TYPES[key].says, value)
                arguments[key] = _value(key, value)
        elif key in _OFF:
            _require(not value or value == "none", key, "off: jrl has no such feature", value)
        elif key == "revision":
            # Of the base model, which is read from a folder, or from the hub as it is there now.
            _require(
                value in (None, "main"),
                key,
                "None or 'main': download that revision and name its folder",
                value,
            )
        elif key not in _SILENT:
            hint = did_you_mean(key, known)
            raise ValueError(f"peft_config: {kind} has no key `{key}`.{hint}")
    missing = [name for name, entry in known.items() if _required(entry) and name not in arguments]
    if missing:
        raise ValueError(f"peft_config: {kind} needs `{missing[0]}`.")
    return KINDS[kind](**arguments)


def _tokens_alone(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of TRAINABLE_TOKENS as those of a LoRA that adapts no map."""
    own = {"token_indices", "target_modules", "init_weights"}
    known = own | {"task_type", "revision"}
    unknown = [key for key, value in values.items() if key not in known | _SILENT and value]
    if unknown:
        raise ValueError(
            f"peft_config: {TOKENS} has no key `{unknown[0]}`.{did_you_mean(unknown[0], sorted(known))}"
        )
    ids, targets = values.get("token_indices"), values.get("target_modules")
    if isinstance(targets, str) and re.fullmatch(r"[\w.]+", targets):
        targets = [targets]  # as PEFT writes the embedding that it found; such a pattern fits its own name
    integers = TYPES["trainable_token_indices"]
    _require(
        isinstance(ids, list | tuple) and integers.holds(ids), "token_indices", "a list of integers", ids
    )
    _require(
        targets is None or (isinstance(targets, list | tuple) and bool(targets)),
        "target_modules",
        f"None, a name or a list of names under {TOKENS}",
        targets,
    )
    _require(
        values.get("init_weights") in (None, True),
        "init_weights",
        f"true under {TOKENS}: rows start as those of the base model",
        values.get("init_weights"),
    )
    rest = {key: value for key, value in values.items() if key not in own}
    rows = ids if targets is None else {str(name): ids for name in targets}
    return {**rest, "peft_type": "LORA", "target_modules": [], "trainable_token_indices": rows}


def plain_peft_config(given: Any) -> dict[str, Any]:
    """A mapping, or a PEFT config object, as plain JSON.

    Raises:
      ValueError: If it is neither.
    """
    if not isinstance(given, Mapping) and not hasattr(given, "to_dict"):
        raise ValueError(
            f"`peft_config` must be a dict of PEFT's keys or a PEFT config object, got {given!r}."
        )
    values = given if isinstance(given, Mapping) else given.to_dict()

    def plain(value: Any) -> Any:
        if isinstance(value, set):
            return sorted(value, key=str)
        return str(value.value) if isinstance(value, Enum) else value

    return {str(key): plain(value) for key, value in values.items()}


def to_peft_dict(config: AdapterConfig) -> dict[str, Any]:
    """The keys of `adapter_config.json` that this adapter decides, as plain JSON."""
    kind = next(name for name, made in KINDS.items() if isinstance(config, made))
    values = {key: _plain(value) for key, value in asdict(config).items() if key != "task_type"}
    if isinstance(config, LoraConfig) and config.trains_tokens_alone:
        rows = values["trainable_token_indices"]
        named = isinstance(rows, dict)
        return {
            "peft_type": TOKENS,
            "token_indices": next(iter(rows.values())) if named else rows,
            "target_modules": list(rows) if named else None,
            "init_weights": True,
        }
    if isinstance(config, PromptConfig):
        # How a prompt began is of no use to its reader, and PEFT would ask for the tokenizer that made it.
        values = {"num_virtual_tokens": config.num_virtual_tokens, "prompt_tuning_init": "RANDOM"}
    return {"peft_type": kind, **values}


def _plain(value: Any) -> Any:
    """Tuples as lists, in a dict as well."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _required(entry: Any) -> bool:
    return entry.default is MISSING and entry.default_factory is MISSING


def _value(key: str, value: Any) -> Any:
    """PEFT's lists and single entries as tuples."""
    if key in ("layers_to_transform", "layers_pattern") and isinstance(value, int | str):
        return (value,)
    if key == "modules_to_save" and isinstance(value, str):
        return (value,)
    if key == "trainable_token_indices" and isinstance(value, Mapping):
        return {name: tuple(ids) for name, ids in value.items()}
    return tuple(value) if isinstance(value, list) else value


def _of_pattern(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """The first entry whose pattern fits the end of a name, at a dot."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name)), default)


def _require(holds: bool, name: str, expected: str, got: object) -> None:
    if not holds:
        raise ValueError(f"peft_config: `{name}` must be {expected}; got {got!r}.")
