# SPDX-License-Identifier: Apache-2.0
"""GLM-4-0414 (Zhipu AI 2025): norms around every sublayer, half of each head rotates in neighbouring pairs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from jrl.models.config import LayerConfig, TransformerConfig
from jrl.models.families import llama_like
from jrl.models.families.base import Family
from jrl.models.families.rope import read_rope


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `Glm4Config`.

    Raises:
      ValueError: If the activation, or the scaling of the rotary positions, is not implemented.
    """
    head_dim = llama_like.read_head_dim(hf)
    rope = read_rope("glm4", hf.rope_parameters, head_dim, partial=True, interleaved=True)
    layers = (LayerConfig(head_dim**-0.5, rope=rope),) * hf.num_hidden_layers
    common = llama_like.read_config("glm4", hf, layers, hf.hidden_act)
    return replace(common, block="sandwich", qkv_bias=hf.attention_bias)


NAMES = llama_like.Names(
    norms=(
        ("input_layernorm", "attn_norm"),
        ("post_self_attn_layernorm", "attn_out_norm"),
        ("post_attention_layernorm", "mlp_norm"),
        ("post_mlp_layernorm", "mlp_out_norm"),
    ),
    gate_up="gate_up_proj",
)


FAMILY = Family(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    read_config=read_config,
    entries=partial(llama_like.entries, names=NAMES),
    base_prefix="model.",
    ignored=llama_like.IGNORED,
)
