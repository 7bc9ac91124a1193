# SPDX-License-Identifier: Apache-2.0
"""Qwen 3 with a mixture of experts (Yang et al. 2025, arXiv:2505.09388) in all layers, or in some of them.

The balancing loss (`output_router_logits`) is left out, as in `jrl.models.families.mixtral`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jrl.models.config import Experts, LayerConfig, TransformerConfig
from jrl.models.families import llama_like
from jrl.models.families.base import Entry, Family
from jrl.models.families.mixtral import expert_entries, read_experts
from jrl.models.families.rope import read_rope
from jrl.models.families.tables import mlp_entries


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `Qwen3MoeConfig`. One with `num_experts` 0 has a plain MLP in every layer.

    Raises:
      ValueError: If there are too few experts, or the activation or the scaling of the rotary positions is not
        implemented.
    """
    head_dim = llama_like.read_head_dim(hf)
    plain = LayerConfig(
        head_dim**-0.5, hf.sliding_window, read_rope("qwen3_moe", hf.rope_parameters, head_dim)
    )
    layers = [plain] * hf.num_hidden_layers
    experts = read_qwen_experts("qwen3_moe", hf)
    for index in range(hf.num_hidden_layers):
        if has_experts(hf, index):
            layers[index] = replace(plain, experts=experts)
    common = llama_like.read_config("qwen3_moe", hf, tuple(layers), hf.hidden_act)
    return replace(common, qkv_bias=hf.attention_bias, attention_out_bias=hf.attention_bias, qk_norm="head")


def has_experts(hf: Any, index: int) -> bool:
    """True for layers with a mixture of experts."""
    is_step, is_plain = (index + 1) % hf.decoder_sparse_step == 0, index in hf.mlp_only_layers
    return bool(hf.num_experts) and is_step and not is_plain


def read_qwen_experts(model_type: str, hf: Any) -> Experts | None:
    """The mixture of experts that some layers have; None where there are no experts, of which other keys may tell.

    Raises:
      ValueError: If a token cannot visit as many experts as it should.
    """
    width, renormalize, _ = hf.moe_intermediate_size, hf.norm_topk_prob, hf.num_experts_per_tok
    if not hf.num_experts:
        return None
    return read_experts(model_type, hf, width, renormalize=renormalize)


def entries(config: TransformerConfig) -> list[Entry]:
    """Every tensor of a Qwen 3 MoE checkpoint."""
    found = llama_like.outer_entries(config)
    for index, layer in enumerate(config.layers):
        found += llama_like.attention_block_entries(config, index)
        name, path = f"model.layers.{index}.mlp", f"layers_{index}"
        if layer.experts is None:
            found += mlp_entries(config, name, f"{path}/mlp")
        else:
            found += expert_entries(
                config,
                layer.experts,
                name,
                f"{path}/experts",
                gate="gate_proj",
                up="up_proj",
                down="down_proj",
            )
    return found


FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    read_config=read_config,
    entries=entries,
    base_prefix="model.",
    ignored=llama_like.IGNORED,
)
