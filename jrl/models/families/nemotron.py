# SPDX-License-Identifier: Apache-2.0
"""Nemotron-4 and Minitron (Parmar et al. 2024, arXiv:2402.16819): LayerNorm by 1 + scale, squared ReLU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jrl.models.config import LayerConfig, TransformerConfig
from jrl.models.families import llama_like
from jrl.models.families.base import Family
from jrl.models.families.rope import read_rope


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `NemotronConfig`.

    Raises:
      ValueError: If the activation, or the scaling of the rotary positions, is not implemented.
    """
    head_dim = llama_like.read_head_dim(hf)
    rope = read_rope("nemotron", hf.rope_parameters, head_dim, partial=True)
    layers = (LayerConfig(head_dim**-0.5, rope=rope),) * hf.num_hidden_layers
    return replace(
        llama_like.read_config("nemotron", hf, layers, hf.hidden_act, norm_epsilon=hf.norm_eps),
        gated_mlp=False,
        norm="layer_plus_one",
        qkv_bias=hf.attention_bias,
        attention_out_bias=hf.attention_bias,
        mlp_bias=hf.mlp_bias,
    )


FAMILY = Family(
    model_type="nemotron",
    architecture="NemotronForCausalLM",
    read_config=read_config,
    entries=llama_like.entries,
    base_prefix="model.",
    ignored=llama_like.IGNORED,
)
