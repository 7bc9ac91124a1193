# SPDX-License-Identifier: Apache-2.0
"""OLMo 3 (OLMo team 2025): OLMo 2 with windows in three of four layers, and rotary positions by type of layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jrl.models.config import LayerConfig, TransformerConfig
from jrl.models.families import llama_like
from jrl.models.families.base import Family
from jrl.models.families.rope import read_rope, without_truncate


def read_config(hf: Any) -> TransformerConfig:
    """Maps an `Olmo3Config`.

    Raises:
      ValueError: If the activation, the types of layers, or a rotary scaling is not implemented.
    """
    head_dim = llama_like.read_head_dim(hf)
    windows = llama_like.read_windows("olmo3", hf)
    layers = tuple(
        LayerConfig(
            head_dim**-0.5,
            window,
            read_rope("olmo3", without_truncate(hf.rope_parameters[kind]), head_dim),
        )
        for kind, window in zip(hf.layer_types, windows, strict=True)
    )
    return replace(
        llama_like.read_config("olmo3", hf, layers, hf.hidden_act),
        block="output_norm",
        qk_norm="all_heads",
        qkv_bias=hf.attention_bias,
        attention_out_bias=hf.attention_bias,
    )


FAMILY = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    read_config=read_config,
    entries=llama_like.entries,
    base_prefix="model.",
    ignored=llama_like.IGNORED,
)
