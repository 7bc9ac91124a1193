# SPDX-License-Identifier: Apache-2.0
"""Hunyuan, dense (Tencent 2025): LLaMA whose queries and keys are normalised after they are rotated."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from jrl.models.config import LayerConfig, TransformerConfig
from jrl.models.families import llama_like
from jrl.models.families.base import Family
from jrl.models.families.rope import read_rope


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `HunYuanDenseV1Config`. Its dynamic scaling with `alpha` is one longer base of the wavelengths.

    Raises:
      ValueError: If the activation, or the scaling of the rotary positions, is not implemented.
    """
    head_dim, parameters = llama_like.read_head_dim(hf), dict(hf.rope_parameters)
    alpha = parameters.pop("alpha", None)
    if parameters["rope_type"] == "dynamic" and alpha:
        stretched = parameters["rope_theta"] * alpha ** (head_dim / (head_dim - 2))
        parameters |= {"rope_type": "default", "rope_theta": stretched}
    layer = LayerConfig(head_dim**-0.5, rope=read_rope("hunyuan_v1_dense", parameters, head_dim))
    return replace(
        llama_like.read_config("hunyuan_v1_dense", hf, (layer,) * hf.num_hidden_layers, hf.hidden_act),
        qkv_bias=hf.attention_bias,
        attention_out_bias=hf.attention_bias,
        qk_norm="head",
        qk_norm_last=True,
    )


NAMES = llama_like.Names(qk_norms=("query_layernorm", "key_layernorm"))


FAMILY = Family(
    model_type="hunyuan_v1_dense",
    architecture="HunYuanDenseV1ForCausalLM",
    read_config=read_config,
    entries=partial(llama_like.entries, names=NAMES),
    base_prefix="model.",
    ignored=llama_like.IGNORED,
)
