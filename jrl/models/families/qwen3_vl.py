# SPDX-License-Identifier: Apache-2.0
"""Qwen 3 VL (Qwen team 2025): the text model of it; see `jrl.models.families.qwen2_5_vl` for its positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jrl.models.config import LayerConfig, TransformerConfig
from jrl.models.families import llama_like
from jrl.models.families.multimodal import text_model
from jrl.models.families.rope import read_rope


def read_text(hf: Any) -> TransformerConfig:
    """Maps a `Qwen3VLTextConfig`.

    Raises:
      ValueError: If the activation, or the scaling of the rotary positions, is not implemented.
    """
    head_dim = llama_like.read_head_dim(hf)
    layer = LayerConfig(head_dim**-0.5, rope=read_rope("qwen3_vl", hf.rope_parameters, head_dim))
    return replace(
        llama_like.read_config("qwen3_vl", hf, (layer,) * hf.num_hidden_layers, hf.hidden_act),
        qkv_bias=hf.attention_bias,
        attention_out_bias=hf.attention_bias,
        qk_norm="head",
    )


FAMILY = text_model("qwen3_vl", "Qwen3VLForConditionalGeneration", read_text)
