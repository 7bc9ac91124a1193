# SPDX-License-Identifier: Apache-2.0
"""Qwen 2 and 2.5 (Yang et al. 2024, arXiv:2407.10671): LLaMA with biases on q, k and v; windows in later layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jrl.models.config import TransformerConfig
from jrl.models.families import llama_like
from jrl.models.families.base import Family


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `Qwen2Config`, whose `layer_types` follow from `use_sliding_window` and `max_window_layers`.

    Raises:
      ValueError: If the activation, the types of layers, or the scaling of the rotary positions is not implemented.
    """
    layers = llama_like.read_layers("qwen2", hf)
    return replace(llama_like.read_config("qwen2", hf, layers, hf.hidden_act), qkv_bias=True)


FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    read_config=read_config,
    entries=llama_like.entries,
    base_prefix="model.",
    ignored=llama_like.IGNORED,
)
