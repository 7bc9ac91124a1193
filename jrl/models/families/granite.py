# SPDX-License-Identifier: Apache-2.0
"""Granite 3 and 4 (IBM 2024): LLaMA with four multipliers: of embedding, attention scores, sublayers and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jrl.models.config import LayerConfig, TransformerConfig
from jrl.models.families import llama_like
from jrl.models.families.base import Family
from jrl.models.families.rope import read_rope


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `GraniteConfig`.

    Raises:
      ValueError: If the activation, or the scaling of the rotary positions, is not implemented, or logits are divided
        by 0.
    """
    if not hf.logits_scaling:
        raise ValueError("granite: `logits_scaling` must not be 0: logits are divided by it.")
    head_dim = llama_like.read_head_dim(hf)
    layer = LayerConfig(hf.attention_multiplier, rope=read_rope("granite", hf.rope_parameters, head_dim))
    return replace(
        llama_like.read_config("granite", hf, (layer,) * hf.num_hidden_layers, hf.hidden_act),
        qkv_bias=hf.attention_bias,
        attention_out_bias=hf.attention_bias,
        mlp_bias=hf.mlp_bias,
        embedding_scale=hf.embedding_multiplier,
        residual_scale=hf.residual_multiplier,
        logit_scale=1 / hf.logits_scaling,
    )


FAMILY = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    read_config=read_config,
    entries=llama_like.entries,
    base_prefix="model.",
    ignored=llama_like.IGNORED,
)
