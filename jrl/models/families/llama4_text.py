# SPDX-License-Identifier: Apache-2.0
"""Llama 4 (Meta 2025): chunks of a row, every fourth layer without positions, and one expert beside a shared one.

Queries of layers without positions grow with the position. torch counts columns for it, padding included; here real
tokens are counted, as for everything. Up to `floor_scale` tokens there is no growth.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jrl.models.config import Experts, LayerConfig, QueryGrowth, Rope, TransformerConfig
from jrl.models.families import llama_like
from jrl.models.families.base import Entry, Family, halves, linear, table
from jrl.models.families.mixtral import read_experts
from jrl.models.families.rope import read_rope
from jrl.models.families.tables import mlp_entries


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `Llama4TextConfig`.

    Raises:
      ValueError: If there are too few experts, or the activation, the types of layers, or the scaling of the rotary
        positions is not implemented.
    """
    head_dim = llama_like.read_head_dim(hf)
    rope = read_rope("llama4_text", hf.rope_parameters, head_dim, interleaved=True)
    experts = replace(
        read_experts("llama4_text", hf, hf.intermediate_size, renormalize=False),
        scoring="sigmoid",
        scale_inputs=True,
        shared_width=hf.intermediate_size,
    )
    chunks = read_chunks(hf)
    layers = tuple(
        LayerConfig(
            head_dim**-0.5,
            rope=rope if rotates else read_growth(hf),
            experts=experts if index in hf.moe_layers else None,
            chunk=chunk,
        )
        for index, (rotates, chunk) in enumerate(zip(hf.no_rope_layers, chunks, strict=False))
    )
    common = llama_like.read_config(
        "llama4_text", hf, layers, hf.hidden_act, mlp_width=hf.intermediate_size_mlp
    )
    return replace(
        common,
        qkv_bias=hf.attention_bias,
        attention_out_bias=hf.attention_bias,
        qk_norm="unit" if hf.use_qk_norm else None,
        qk_norm_last=bool(hf.use_qk_norm),
    )


def read_chunks(hf: Any) -> tuple[int | None, ...]:
    """Tokens of a chunk for every layer; None: it reads all.

    Raises:
      ValueError: If a type of layer is unknown, a layer lacks one, or the size of a chunk is missing.
    """
    kinds = {"full_attention": None, "chunked_attention": hf.attention_chunk_size}
    chunks = llama_like.read_kinds("llama4_text", hf, kinds)
    if "chunked_attention" in hf.layer_types and not hf.attention_chunk_size:
        raise ValueError(
            f"llama4_text: `attention_chunk_size` must be a number of tokens, got {hf.attention_chunk_size!r}: "
            "`layer_types` has layers with chunks."
        )
    if len(hf.no_rope_layers) < len(chunks):
        raise ValueError(
            f"llama4_text: `no_rope_layers` must have an entry for each of {len(chunks)} layers, got "
            f"{len(hf.no_rope_layers)}."
        )
    return chunks


def read_growth(hf: Any) -> Rope | None:
    """The growth of queries, which stands for rotary positions in a layer without them; None: there is none."""
    if not hf.attn_temperature_tuning:
        return None
    growth = QueryGrowth(float(hf.attn_scale), int(hf.floor_scale), first=1)
    return Rope(1.0, dim=0, query_growth=growth)


def entries(config: TransformerConfig) -> list[Entry]:
    """Every tensor of a Llama 4 language model."""
    found = llama_like.outer_entries(config)
    plain = replace(config, qk_norm=None)  # these norms have no scale
    for index, layer in enumerate(config.layers):
        name, path = f"model.layers.{index}.feed_forward", f"layers_{index}"
        found += llama_like.attention_block_entries(plain, index)
        if layer.experts is None:
            found += mlp_entries(config, name, f"{path}/mlp")
        else:
            found += _expert_entries(config, layer.experts, name, path)
    return found


def _expert_entries(config: TransformerConfig, experts: Experts, name: str, path: str) -> list[Entry]:
    count, width, inner = experts.count, config.width, experts.width
    gate_up = (f"{path}/experts/gate", f"{path}/experts/up")
    shared = replace(config, mlp_width=inner)
    return [
        Entry(f"{name}.router.weight", (f"{path}/experts/router/kernel",), linear(), (count, width)),
        Entry(f"{name}.experts.gate_up_proj", gate_up, halves(), (count, width, 2 * inner)),
        Entry(f"{name}.experts.down_proj", (f"{path}/experts/down",), table(), (count, inner, width)),
        *mlp_entries(shared, f"{name}.shared_expert", f"{path}/shared_mlp"),
    ]


FAMILY = Family(
    model_type="llama4_text",
    architecture="Llama4ForCausalLM",
    read_config=read_config,
    entries=entries,
    base_prefix="model.",
    ignored=llama_like.IGNORED,
)
