# SPDX-License-Identifier: Apache-2.0
"""LLaMA 1 to 3 (Touvron et al. 2023, arXiv:2302.13971): rotary positions, RMSNorm, gated MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jrl.models.config import LayerConfig, TransformerConfig
from jrl.models.families import llama_like
from jrl.models.families.base import Family
from jrl.models.families.rope import read_rope


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `LlamaConfig`.

    Raises:
      ValueError: If the activation, or the scaling of the rotary positions, is not implemented.
    """
    head_dim = llama_like.read_head_dim(hf)
    layer = LayerConfig(head_dim**-0.5, rope=read_rope("llama", hf.rope_parameters, head_dim))
    common = llama_like.read_config("llama", hf, (layer,) * hf.num_hidden_layers, hf.hidden_act)
    return replace(
        common, qkv_bias=hf.attention_bias, attention_out_bias=hf.attention_bias, mlp_bias=hf.mlp_bias
    )


FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    read_config=read_config,
    entries=llama_like.entries,
    base_prefix="model.",
    ignored=llama_like.IGNORED,
)
