# SPDX-License-Identifier: Apache-2.0
"""EXAONE 4 (LG AI Research 2025, arXiv:2507.11407): OLMo 2's norms, head-wise norms of queries and keys, windows.

Where there are windows, the layers that see everything have no positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jrl.models.config import TransformerConfig
from jrl.models.families import llama_like
from jrl.models.families.base import Family


def read_config(hf: Any) -> TransformerConfig:
    """Maps an `Exaone4Config`.

    Raises:
      ValueError: If the activation, the types of layers, or the scaling of the rotary positions is not implemented.
    """
    layers = llama_like.read_layers("exaone4", hf)
    if hf.sliding_window is not None:
        layers = tuple(layer if layer.window is not None else replace(layer, rope=None) for layer in layers)
    return replace(
        llama_like.read_config("exaone4", hf, layers, hf.hidden_act), block="output_norm", qk_norm="head"
    )


FAMILY = Family(
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    read_config=read_config,
    entries=llama_like.entries,
    base_prefix="model.",
    ignored=llama_like.IGNORED,
)
