# SPDX-License-Identifier: Apache-2.0
"""Ministral 8B (Mistral AI 2024): Mistral with a type, full or sliding, for every layer."""

from __future__ import annotations

from typing import Any

from jrl.models.config import TransformerConfig
from jrl.models.families import llama_like
from jrl.models.families.base import Family


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `MinistralConfig`.

    Raises:
      ValueError: If the activation, the types of layers, or the scaling of the rotary positions is not implemented.
    """
    return llama_like.read_config("ministral", hf, llama_like.read_layers("ministral", hf), hf.hidden_act)


FAMILY = Family(
    model_type="ministral",
    architecture="MinistralForCausalLM",
    read_config=read_config,
    entries=llama_like.entries,
    base_prefix="model.",
    ignored=llama_like.IGNORED,
)
