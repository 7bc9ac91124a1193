# SPDX-License-Identifier: Apache-2.0
"""GLM-4.5 to 4.7 (GLM team 2025, arXiv:2508.06471): grouped attention, and DeepSeek-V3's experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jrl.models.config import LayerConfig, TransformerConfig
from jrl.models.families import llama_like
from jrl.models.families.base import Entry, Family
from jrl.models.families.deepseek_v3 import feed_forward_entries, read_grouped_experts
from jrl.models.families.rope import read_rope


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `Glm4MoeConfig`.

    Raises:
      ValueError: If numbers of experts do not fit together, or the activation or the scaling of the rotary positions
        is not implemented.
    """
    head_dim = llama_like.read_head_dim(hf)
    plain = LayerConfig(
        head_dim**-0.5, rope=read_rope("glm4_moe", hf.rope_parameters, head_dim, partial=True)
    )
    sparse = replace(plain, experts=read_grouped_experts("glm4_moe", hf))
    dense = min(hf.first_k_dense_replace, hf.num_hidden_layers)
    layers = (plain,) * dense + (sparse,) * (hf.num_hidden_layers - dense)
    common = llama_like.read_config("glm4_moe", hf, layers, hf.hidden_act)
    return replace(common, qkv_bias=hf.attention_bias, qk_norm="head" if hf.use_qk_norm else None)


def entries(config: TransformerConfig) -> list[Entry]:
    """Every tensor of a GLM-4.5 checkpoint."""
    found = llama_like.outer_entries(config)
    for index, layer in enumerate(config.layers):
        found += llama_like.attention_block_entries(config, index)
        found += feed_forward_entries(config, layer, f"model.layers.{index}.mlp", f"layers_{index}")
    return found


FAMILY = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    read_config=read_config,
    entries=entries,
    base_prefix="model.",
    ignored=llama_like.IGNORED,
    has_prediction_layer=True,
)
