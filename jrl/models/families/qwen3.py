# SPDX-License-Identifier: Apache-2.0
"""Qwen 3 (Yang et al. 2025, arXiv:2505.09388): LLaMA with an RMSNorm over every head's query and key."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jrl.models.config import TransformerConfig
from jrl.models.families import llama_like
from jrl.models.families.base import Family


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `Qwen3Config`.

    Raises:
      ValueError: If the activation, the types of layers, or the scaling of the rotary positions is not implemented.
    """
    common = llama_like.read_config("qwen3", hf, llama_like.read_layers("qwen3", hf), hf.hidden_act)
    return replace(common, qkv_bias=hf.attention_bias, attention_out_bias=hf.attention_bias, qk_norm="head")


FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    read_config=read_config,
    entries=llama_like.entries,
    base_prefix="model.",
    ignored=llama_like.IGNORED,
)
