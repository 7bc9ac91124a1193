# SPDX-License-Identifier: Apache-2.0
"""Qwen 1.5 and 2 with a mixture of experts (Yang et al. 2024, arXiv:2407.10671), and a gated MLP that all tokens visit.

The balancing loss (`output_router_logits`) is left out, as in `jrl.models.families.mixtral`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jrl.models.config import Experts, LayerConfig, TransformerConfig
from jrl.models.families import llama_like
from jrl.models.families.base import Entry, Family
from jrl.models.families.mixtral import expert_entries
from jrl.models.families.qwen3_moe import has_experts, read_qwen_experts
from jrl.models.families.tables import linear_entries, mlp_entries


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `Qwen2MoeConfig`.

    Raises:
      ValueError: If there are too few experts, or the activation, the types of layers, or the scaling of the rotary
        positions is not implemented.
    """
    layers = llama_like.read_layers("qwen2_moe", hf)
    experts = with_shared_expert(hf, read_qwen_experts("qwen2_moe", hf))
    layers = tuple(
        replace(layer, experts=experts) if has_experts(hf, index) else layer
        for index, layer in enumerate(layers)
    )
    return replace(llama_like.read_config("qwen2_moe", hf, layers, hf.hidden_act), qkv_bias=hf.qkv_bias)


def with_shared_expert(hf: Any, experts: Experts | None) -> Experts | None:
    """Experts with the one under a gate that all tokens share; None where there are none, of which other keys tell."""
    width = hf.shared_expert_intermediate_size
    return None if experts is None else replace(experts, shared_width=width, shared_gate=True)


def entries(config: TransformerConfig) -> list[Entry]:
    """Every tensor of a Qwen 2 MoE checkpoint."""
    found = llama_like.outer_entries(config)
    for index, layer in enumerate(config.layers):
        found += llama_like.attention_block_entries(config, index)
        found += feed_forward_entries(config, layer, f"model.layers.{index}.mlp", f"layers_{index}")
    return found


def feed_forward_entries(config: TransformerConfig, layer: LayerConfig, name: str, path: str) -> list[Entry]:
    """The MLP, or experts with the shared one."""
    if layer.experts is None:
        return mlp_entries(config, name, f"{path}/mlp")
    assert layer.experts.shared_width is not None
    parts = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    shared = replace(config, mlp_width=layer.experts.shared_width)
    gate = (f"{path}/shared_gate",)
    return [
        *expert_entries(config, layer.experts, name, f"{path}/experts", **parts),
        *mlp_entries(shared, f"{name}.shared_expert", f"{path}/shared_mlp"),
        *linear_entries(f"{name}.shared_expert_gate", gate, config.width, 1, bias=False),
    ]


FAMILY = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    read_config=read_config,
    entries=entries,
    base_prefix="model.",
    ignored=llama_like.IGNORED,
)
