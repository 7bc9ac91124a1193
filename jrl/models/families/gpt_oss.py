# SPDX-License-Identifier: Apache-2.0
"""gpt-oss (OpenAI 2025, arXiv:2508.10925): experts with biases and a clamped gate, attention sinks, windows.

A checkpoint holds all experts of a layer in one tensor, gate and up in turn. Those that are packed as MXFP4 are
expanded when they are read (`jrl.models.mxfp4`), and written expanded. The balancing loss (`output_router_logits`) is
left out, as in `jrl.models.families.mixtral`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jrl.models.config import ClampedGlu, Experts, TransformerConfig
from jrl.models.families import llama_like
from jrl.models.families.base import Entry, Family, interleaved, require, table
from jrl.models.families.mixtral import read_experts
from jrl.models.families.tables import linear_entries


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `GptOssConfig`.

    Raises:
      ValueError: If there are too few experts, or the activation, the types of layers, or the scaling of the rotary
        positions is not implemented.
    """
    require("gpt_oss", "hidden_act", "silu", hf.hidden_act, "the torch model has a gate of its own")
    experts = replace(
        read_experts("gpt_oss", hf, hf.intermediate_size, renormalize=True),
        use_bias=True,
        clamped_glu=ClampedGlu(hf.swiglu_alpha, hf.swiglu_limit),
    )
    layers = tuple(replace(layer, experts=experts) for layer in llama_like.read_layers("gpt_oss", hf))
    return replace(
        llama_like.read_config("gpt_oss", hf, layers, hf.hidden_act),
        qkv_bias=hf.attention_bias,
        attention_out_bias=hf.attention_bias,
        attention_sinks=True,
    )


def entries(config: TransformerConfig) -> list[Entry]:
    """Every tensor of a gpt-oss checkpoint."""
    found = llama_like.outer_entries(config)
    for index, layer in enumerate(config.layers):
        name, path = f"model.layers.{index}", f"layers_{index}"
        assert layer.experts is not None
        found += llama_like.attention_block_entries(config, index)
        found.append(Entry(f"{name}.self_attn.sinks", (f"{path}/attn/sinks",), table(), (config.num_heads,)))
        found += _expert_entries(config, layer.experts, f"{name}.mlp", f"{path}/experts")
    return found


def _expert_entries(config: TransformerConfig, experts: Experts, name: str, path: str) -> list[Entry]:
    count, width, inner = experts.count, config.width, experts.width
    gate_up, biases = (f"{path}/gate", f"{path}/up"), (f"{path}/gate_bias", f"{path}/up_bias")
    return [
        *linear_entries(f"{name}.router", (f"{path}/router",), width, count, bias=True),
        Entry(f"{name}.experts.gate_up_proj", gate_up, interleaved(), (count, width, 2 * inner)),
        Entry(f"{name}.experts.gate_up_proj_bias", biases, interleaved(), (count, 2 * inner)),
        Entry(f"{name}.experts.down_proj", (f"{path}/down",), table(), (count, inner, width)),
        Entry(f"{name}.experts.down_proj_bias", (f"{path}/down_bias",), table(), (count, width)),
    ]


FAMILY = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    read_config=read_config,
    entries=entries,
    base_prefix="model.",
    ignored=llama_like.IGNORED,
)
