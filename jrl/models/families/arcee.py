# SPDX-License-Identifier: Apache-2.0
"""Arcee's AFM (Arcee AI 2025): LLaMA with an MLP of squared ReLU that is not gated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jrl.models.config import LayerConfig, TransformerConfig
from jrl.models.families import llama_like
from jrl.models.families.base import Family
from jrl.models.families.rope import read_rope


def read_config(hf: Any) -> TransformerConfig:
    """Maps an `ArceeConfig`.

    Raises:
      ValueError: If the activation, or the scaling of the rotary positions, is not implemented.
    """
    head_dim = llama_like.read_head_dim(hf)
    layer = LayerConfig(head_dim**-0.5, rope=read_rope("arcee", hf.rope_parameters, head_dim))
    return replace(
        llama_like.read_config("arcee", hf, (layer,) * hf.num_hidden_layers, hf.hidden_act),
        gated_mlp=False,
        qkv_bias=hf.attention_bias,
        attention_out_bias=hf.attention_bias,
        mlp_bias=hf.mlp_bias,
    )


FAMILY = Family(
    model_type="arcee",
    architecture="ArceeForCausalLM",
    read_config=read_config,
    entries=llama_like.entries,
    base_prefix="model.",
    ignored=llama_like.IGNORED,
)
