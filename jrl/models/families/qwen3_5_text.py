# SPDX-License-Identifier: Apache-2.0
"""The language model of Qwen 3.5 (Qwen team 2026): Qwen3-Next with an MLP, and with a projection a tensor."""

from __future__ import annotations

from typing import Any

from jrl.models.config import GatedDelta, TransformerConfig
from jrl.models.families import llama_like, qwen3_next
from jrl.models.families.base import Entry, Family
from jrl.models.families.qwen2_moe import feed_forward_entries
from jrl.models.families.tables import linear_entries


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `Qwen3_5TextConfig`.

    Raises:
      ValueError: If heads do not fit together, or the activation, a type of layer or the scaling of the rotary
        positions is not implemented.
    """
    layers = qwen3_next.read_layers("qwen3_5_text", hf)
    return qwen3_next.read_hybrid("qwen3_5_text", hf, layers, hf.intermediate_size)


def entries(config: TransformerConfig) -> list[Entry]:
    """Every tensor of a Qwen 3.5 language model."""
    found = llama_like.outer_entries(config)
    for index, layer in enumerate(config.layers):
        name, path = f"model.layers.{index}", f"layers_{index}"
        found += llama_like.block_norm_entries(config, index)
        if isinstance(layer.mixer, GatedDelta):
            found += _delta_entries(config, layer.mixer, f"{name}.linear_attn", f"{path}/attn")
        else:
            found += qwen3_next.gated_attention_entries(config, f"{name}.self_attn", f"{path}/attn")
        found += feed_forward_entries(config, layer, f"{name}.mlp", path)
    return found


def _delta_entries(config: TransformerConfig, sizes: GatedDelta, name: str, path: str) -> list[Entry]:
    keys, values = sizes.key_heads * sizes.key_dim, sizes.value_heads * sizes.value_dim
    parts = (
        ("in_proj_qkv", ("q", "k", "v"), 2 * keys + values),
        ("in_proj_z", ("gate",), values),
        ("in_proj_b", ("rate",), sizes.value_heads),
        ("in_proj_a", ("decay",), sizes.value_heads),
    )
    found = []
    for hf_part, names, size in parts:
        paths = tuple(f"{path}/{part}" for part in names)
        found += linear_entries(f"{name}.{hf_part}", paths, config.width, size, bias=False)
    return found + qwen3_next.small_delta_entries(config, sizes, name, path)


FAMILY = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    read_config=read_config,
    entries=entries,
    base_prefix="model.",
    ignored=qwen3_next.IGNORED,
    classifier="Qwen3_5TextForSequenceClassification",
)
