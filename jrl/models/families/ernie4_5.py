# SPDX-License-Identifier: Apache-2.0
"""ERNIE 4.5, dense (Baidu 2025): LLaMA with interleaved rotary positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jrl.models.config import LayerConfig, TransformerConfig
from jrl.models.families import llama_like
from jrl.models.families.base import Family
from jrl.models.families.rope import read_rope


def read_config(hf: Any) -> TransformerConfig:
    """Maps an `Ernie4_5Config`.

    Raises:
      ValueError: If the activation, or the scaling of the rotary positions, is not implemented.
    """
    head_dim = llama_like.read_head_dim(hf)
    rope = read_rope("ernie4_5", hf.rope_parameters, head_dim, interleaved=True)
    layers, bias = (LayerConfig(head_dim**-0.5, rope=rope),) * hf.num_hidden_layers, bool(hf.use_bias)
    return replace(
        llama_like.read_config("ernie4_5", hf, layers, hf.hidden_act, attention_dropout=0.0),
        qkv_bias=bias,
        attention_out_bias=bias,
        mlp_bias=bias,
    )


FAMILY = Family(
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    read_config=read_config,
    entries=llama_like.entries,
    base_prefix="model.",
    ignored=llama_like.IGNORED,
)
