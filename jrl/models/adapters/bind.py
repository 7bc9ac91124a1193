# SPDX-License-Identifier: Apache-2.0
"""Binds an adapter's configuration to a model: the parameters it touches, and the shapes of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax

from jrl.mesh import path_name
from jrl.models.adapters.config import AdapterConfig, LoraConfig
from jrl.models.adapters.lora import Lora
from jrl.models.adapters.targets import bind_lora, check_task, modules_of
from jrl.models.adapters.token_rows import Vocabulary, bind_token_rows
from jrl.models.adapters.virtual_tokens import VirtualTokens
from jrl.models.adapters.whole_modules import bind_whole_modules
from jrl.models.config import TransformerConfig
from jrl.models.entries_io import initial_shapes
from jrl.models.families.base import Entry

Adapter = Lora | VirtualTokens
"""A configuration bound to a model."""


def bind_adapter(
    config: AdapterConfig,
    model: TransformerConfig,
    entries: Sequence[Entry],
    init: Callable[[Any], Any],
    model_type: str,
) -> Adapter:
    """Binds a configuration to a model.

    Args:
      config: The configuration.
      model: The architecture.
      entries: The model's table of tensors.
      init: Makes its parameters from a key; only their shapes are asked for.
      model_type: Names the family.
    Raises:
      ValueError: If the configuration does not fit the model.
    """
    check_task(config, model_type)
    if not isinstance(config, LoraConfig):
        return VirtualTokens(config, model)
    return bind_language_lora(config, model, entries, init, model_type)


def bind_language_lora(
    config: LoraConfig,
    model: Any,
    entries: Sequence[Entry],
    init: Callable[[Any], Any],
    model_type: str,
) -> Lora:
    """Binds a LoRA to a language model, with the tokens and the modules that train beside.

    Args:
      config: The configuration.
      model: The architecture, of a decoder or an encoder and decoder.
      entries: The model's table of tensors.
      init: Makes its parameters from a key; only their shapes are asked for.
      model_type: Names the family.
    Raises:
      ValueError: If the configuration does not fit the model.
    """
    leaves = jax.tree_util.tree_leaves_with_path(initial_shapes(init))
    shapes = {path_name(path): leaf.shape for path, leaf in leaves}
    lora = bind_lora(config, entries, shapes, model_type)
    if config.trainable_token_indices is None and not config.modules_to_save:
        return lora
    modules, vocabulary = modules_of(entries), Vocabulary.of(entries, model, model_type)
    rows = bind_token_rows(config, list(modules), vocabulary)
    taken = [module.name for module in lora.modules]
    adapted = [each.name for each in rows if each.name in taken]
    if adapted:
        raise ValueError(
            f"peft_config: `trainable_token_indices` must leave out {adapted[0]}, which `target_modules` adapts."
        )
    names = config.modules_to_save or ()
    return replace(
        lora,
        tokens=rows,
        whole=bind_whole_modules(names, modules, shapes, vocabulary, taken, rows),
    )
