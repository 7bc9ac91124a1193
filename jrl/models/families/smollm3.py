# SPDX-License-Identifier: Apache-2.0
"""SmolLM 3 (Hugging Face 2025): LLaMA where every few layers have no positions (NoPE, Yang et al. 2025, 2501.18795)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jrl.models.config import TransformerConfig
from jrl.models.families import llama_like
from jrl.models.families.base import Family


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `SmolLM3Config`; `no_rope_layers` holds 1 where a layer does rotate.

    Raises:
      ValueError: If the activation, the types of layers, or the scaling of the rotary positions is not implemented.
    """
    if len(hf.no_rope_layers) < hf.num_hidden_layers:
        raise ValueError(
            f"smollm3: `no_rope_layers` must have num_hidden_layers = {hf.num_hidden_layers} entries, "
            f"got {len(hf.no_rope_layers)}."
        )
    layers = tuple(
        layer if rotates else replace(layer, rope=None)
        for layer, rotates in zip(llama_like.read_layers("smollm3", hf), hf.no_rope_layers, strict=False)
    )
    return replace(
        llama_like.read_config("smollm3", hf, layers, hf.hidden_act),
        qkv_bias=hf.attention_bias,
        attention_out_bias=hf.attention_bias,
        mlp_bias=hf.mlp_bias,
    )


FAMILY = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    read_config=read_config,
    entries=llama_like.entries,
    base_prefix="model.",
    ignored=llama_like.IGNORED,
)
