# SPDX-License-Identifier: Apache-2.0
"""Adapters of runs: the choice of one, its start, and its files."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jrl.models.adapters.bind import Adapter
from jrl.models.adapters.config import (
    CAUSAL,
    SEQ2SEQ,
    AdapterConfig,
    LoraConfig,
    PromptConfig,
    read_adapter_config,
)
from jrl.models.adapters.peft_format import (
    is_adapter_folder,
    load_adapter,
    load_heads,
    read_adapter_folder,
    save_adapter,
)
from jrl.models.hub import name_of_base
from jrl.models.model import LanguageModel
from jrl.models.model_object import ModelObject
from jrl.placement import fetch
from jrl.trainers.config.sections import ModelConfig
from jrl.typing import Params


@dataclass(frozen=True)
class AdapterPlan:
    """Plan of the adapter, from `model.model_path` and `model.peft_config` together.

    Attributes:
      config: The adapter that trains; None: parts of the model itself do.
      base: The model it belongs to, as `model_path` would name it alone.
      folder: Folder with an adapter, whose heads are taken, or a PEFT model object; None where `model_path` is a
        model.
      continues: The folder's adapter is taken too; else a fresh one starts.
    """

    config: AdapterConfig | None
    base: Any
    folder: Path | ModelObject | None = None
    continues: bool = False

    @property
    def num_virtual_tokens(self) -> int:
        """Columns before every row that are no tokens."""
        return (
            0
            if self.config is None or isinstance(self.config, LoraConfig)
            else self.config.num_virtual_tokens
        )

    def load(self, lm: LanguageModel) -> dict[str, Any]:
        """Loads the folder's share of the trainable parameters: the adapter, where it is continued, and heads."""
        if self.folder is None:
            return {}
        found = load_heads(
            self.folder,
            width=lm.feature_width,
            vocab_size=lm.vocab_size,
            padded_vocab_size=lm.config.padded_vocab_size,
        )
        adapter = lm.bind(self.config)
        if self.continues and adapter is not None:
            found |= load_adapter(self.folder, adapter)
        return found


def plan_adapter(model: ModelConfig, tokenizer: Any, *, dropout: bool = False) -> AdapterPlan:
    """Reads `model.peft_config`, or the adapter that `model.model_path` holds.

    Args:
      model: The section of the configuration.
      tokenizer: Reads the text that a prompt may start as.
      dropout: Whether the run draws dropout, so that an adapter's rate has its effect.
    Raises:
      ValueError: If the configuration is not supported, or the folder does not name its base model.
    """
    given = None if model.peft_config is None else read_adapter_config(model.peft_config)
    if given is not None:
        _warn_of_what_is_ignored(model, given, "`model.peft_config` is given", dropout=dropout)
    if isinstance(given, PromptConfig) and given.prompt_tuning_init == "TEXT":
        given = replace(given, text_ids=tuple(tokenizer(given.prompt_tuning_init_text)["input_ids"]))
    if not is_adapter_folder(model.model_path):
        return AdapterPlan(given, model.model_path)
    found = read_adapter_folder(model.model_path)
    if found.base_model is None:
        raise ValueError(
            f"`model.model_path` {str(model.model_path)!r} holds an adapter, but its adapter_config.json has no "
            "`base_model_name_or_path`: name the folder or hub id of the model it belongs to there."
        )
    if given is None:
        _warn_of_what_is_ignored(model, found.config, "`model.model_path` holds an adapter", dropout=dropout)
        return AdapterPlan(found.config, found.base_model, found.folder, continues=True)
    warnings.warn(
        f"`model.peft_config` is given and {model.model_path} holds an adapter: a fresh one is trained on the base "
        f"model {found.base_model!r}, and that one is not used.",
        stacklevel=4,
    )
    return AdapterPlan(given, found.base_model, found.folder)


def _warn_of_what_is_ignored(
    model: ModelConfig, adapter: AdapterConfig, reason: str, *, dropout: bool
) -> None:
    if model.num_layers_unfrozen != -1:
        warnings.warn(
            f"`model.num_layers_unfrozen` is {model.num_layers_unfrozen}, but {reason}: the whole model is frozen "
            "and the adapter trains.",
            stacklevel=5,
        )
    if isinstance(adapter, LoraConfig) and adapter.lora_dropout and not dropout:
        warnings.warn(
            f"`lora_dropout` is {adapter.lora_dropout}, but jrl trains without dropout, which would make the ratio of "
            "two passes random: it has no effect.",
            stacklevel=5,
        )


def adapter_writer(
    lm: LanguageModel, adapter: Adapter, params: Params, *, base_model: Any, tokenizer: Any
) -> Callable[[Path], None]:
    """A function that writes PEFT's folder: the adapter, the heads beside it, and the tokenizer.

    Args:
      lm: The model.
      adapter: What trains.
      params: The trainable parameters and target heads, copied to the host of process 0 here.
      base_model: As `model_path` names it.
      tokenizer: The transformers tokenizer.
    """
    host: Mapping[str, Any] = fetch(dict(params), everywhere=False)
    name = name_of_base(base_model)
    task_type = SEQ2SEQ if lm.family.kind == "seq2seq" else CAUSAL

    def write(directory: Path) -> None:
        save_adapter(
            directory,
            adapter,
            host,
            base_model=name,
            task_type=task_type,
            tokenizer=tokenizer,
            vocab_size=lm.vocab_size,
        )

    return write
