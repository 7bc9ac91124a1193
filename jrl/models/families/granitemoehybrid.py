# SPDX-License-Identifier: Apache-2.0
"""Granite 4 (IBM 2025): Mamba-2 and attention by layer, Granite's multipliers, and experts beside an MLP or none.

A checkpoint holds all experts of a layer in two tensors. The balancing loss (`output_router_logits`) is left out, as in
`jrl.models.families.mixtral`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jrl.models.config import Experts, LayerConfig, Rope, TransformerConfig
from jrl.models.families import llama_like, mamba2_like
from jrl.models.families.base import Entry, Family, stacked_linear
from jrl.models.families.granite import read_multipliers
from jrl.models.families.mixtral import read_experts
from jrl.models.families.rope import read_rope
from jrl.models.families.tables import linear_entries

SHARED = llama_like.Names(gate_up="input_linear", down="output_linear")


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `GraniteMoeHybridConfig`. One with `num_local_experts` 0 has a plain MLP in every layer.

    Raises:
      ValueError: If there are too few experts, logits are divided by 0, projections of the state space have biases, its
        groups do not divide its heads, or the activation, a type of layer, or the kind of positions is not implemented.
    """
    plain = LayerConfig(hf.attention_multiplier, experts=_read_experts(hf))
    kinds = {
        "linear_attention": replace(plain, mixer=mamba2_like.read_mamba("granitemoehybrid", hf)),
        "full_attention": replace(plain, rope=_read_positions(hf)),
    }
    layers = llama_like.read_kinds("granitemoehybrid", hf, kinds)
    return read_multipliers("granitemoehybrid", hf, layers, hf.shared_intermediate_size)


def _read_experts(hf: Any) -> Experts | None:
    """Experts beside the MLP of all tokens; None where there are none, of which other keys may tell."""
    width, shared, _ = hf.intermediate_size, hf.shared_intermediate_size, hf.num_experts_per_tok
    if not hf.num_local_experts:
        return None
    # A softmax over the chosen ones alone is that over all of them, divided by the sum of the chosen.
    experts = read_experts("granitemoehybrid", hf, width, renormalize=True)
    return replace(experts, shared_width=shared)


def _read_positions(hf: Any) -> Rope | None:
    """Rotary positions; None where there are none, of which another key tells all the same."""
    kind, parameters = hf.position_embedding_type, hf.rope_parameters
    if kind not in (None, "nope", "rope"):
        raise ValueError(
            f"granitemoehybrid: `position_embedding_type` must be None, 'nope' or 'rope', got {kind!r}: no other kind "
            "of positions is implemented."
        )
    if kind != "rope":
        return None
    return read_rope("granitemoehybrid", parameters, llama_like.read_head_dim(hf))


def entries(config: TransformerConfig) -> list[Entry]:
    """Every tensor of a Granite 4 checkpoint."""
    found = llama_like.outer_entries(config)
    for index, layer in enumerate(config.layers):
        name, path = f"model.layers.{index}", f"layers_{index}"
        found += llama_like.block_norm_entries(config, index)
        found += mamba2_like.mixer_entries(config, layer, name, path)
        mlp = "mlp"
        if layer.experts is not None:
            mlp = "shared_mlp"
            found += _expert_entries(config, layer.experts, f"{name}.block_sparse_moe", f"{path}/experts")
        found += llama_like.gated_mlp_entries(config, f"{name}.shared_mlp", f"{path}/{mlp}", SHARED)
    return found


def _expert_entries(config: TransformerConfig, experts: Experts, name: str, path: str) -> list[Entry]:
    count, width, inner = experts.count, config.width, experts.width
    gate_up = (f"{path}/gate", f"{path}/up")
    return [
        *linear_entries(f"{name}.router.layer", (f"{path}/router",), width, count, bias=False),
        Entry(f"{name}.input_linear.weight", gate_up, stacked_linear(), (count, 2 * inner, width)),
        Entry(f"{name}.output_linear.weight", (f"{path}/down",), stacked_linear(), (count, width, inner)),
    ]


FAMILY = Family(
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    read_config=read_config,
    entries=entries,
    base_prefix="model.",
    ignored=llama_like.IGNORED,
)
