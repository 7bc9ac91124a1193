# SPDX-License-Identifier: Apache-2.0
"""Binds an adapter's configuration to a model: the parameters it touches, and the shapes of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jrl.mesh import path_name
from jrl.models.adapters.config import AdapterConfig, LoraConfig
from jrl.models.adapters.lora import Lora
from jrl.models.adapters.targets import bind_lora, check_task
from jrl.models.adapters.virtual_tokens import VirtualTokens
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
    leaves = jax.tree_util.tree_leaves_with_path(initial_shapes(init))
    return bind_lora(config, entries, {path_name(path): leaf.shape for path, leaf in leaves}, model_type)
