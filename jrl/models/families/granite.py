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
    head_dim = llama_like.read_head_dim(hf)
    layer = LayerConfig(hf.attention_multiplier, rope=read_rope("granite", hf.rope_parameters, head_dim))
    config = read_multipliers("granite", hf, (layer,) * hf.num_hidden_layers, hf.intermediate_size)
    return replace(config, mlp_bias=hf.mlp_bias)


def read_multipliers(
    model_type: str, hf: Any, layers: tuple[LayerConfig, ...], mlp_width: int
) -> TransformerConfig:
    """A decoder with Granite's multipliers, but for that of attention, which is the layers'.

    Raises:
      ValueError: If the activation is unknown, or logits are divided by 0.
    """
    if not hf.logits_scaling:
        raise ValueError(f"{model_type}: `logits_scaling` must not be 0: logits are divided by it.")
    return replace(
        llama_like.read_config(model_type, hf, layers, hf.hidden_act, mlp_width=mlp_width),
        qkv_bias=hf.attention_bias,
        attention_out_bias=hf.attention_bias,
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
