# SPDX-License-Identifier: Apache-2.0
"""OLMo 2 (OLMo team 2024, arXiv:2501.00656): norms after the sublayers, and over all queries and keys of a token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jrl.models.config import LayerConfig, TransformerConfig
from jrl.models.families import llama_like
from jrl.models.families.base import Family
from jrl.models.families.rope import read_rope


def read_config(hf: Any) -> TransformerConfig:
    """Maps an `Olmo2Config`.

    Raises:
      ValueError: If the activation, or the scaling of the rotary positions, is not implemented.
    """
    head_dim = llama_like.read_head_dim(hf)
    layer = LayerConfig(head_dim**-0.5, rope=read_rope("olmo2", hf.rope_parameters, head_dim))
    return replace(
        llama_like.read_config("olmo2", hf, (layer,) * hf.num_hidden_layers, hf.hidden_act),
        block="output_norm",
        qk_norm="all_heads",
        qkv_bias=hf.attention_bias,
        attention_out_bias=hf.attention_bias,
    )


FAMILY = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    read_config=read_config,
    entries=llama_like.entries,
    base_prefix="model.",
    ignored=llama_like.IGNORED,
)
