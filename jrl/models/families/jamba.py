# SPDX-License-Identifier: Apache-2.0
"""Jamba (AI21 2024, arXiv:2403.19887 and 2408.12570): Mamba in most layers, attention in few, experts in every other.

Attention has no positions. The balancing loss (`output_router_logits`) is left out, as in
`jrl.models.families.mixtral`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jrl.models.config import Experts, LayerConfig, Mamba1, TransformerConfig
from jrl.models.families import llama_like, mamba2_like
from jrl.models.families.base import Entry, Family, channels, require, turned, vector
from jrl.models.families.mixtral import expert_entries, read_experts
from jrl.models.families.tables import attention_entries, linear_entries, mlp_entries, norm_entries


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `JambaConfig`.

    Raises:
      ValueError: If projections of the scan have biases, what steers it is not normalised, there are too few experts,
        or the activation is not SiLU.
    """
    attention = LayerConfig(llama_like.read_head_dim(hf) ** -0.5)
    recurrence, experts = replace(attention, mixer=_read_mamba(hf)), _read_experts(hf)
    layers = []
    for index in range(hf.num_hidden_layers):
        attends = index % hf.attn_layer_period == hf.attn_layer_offset
        routes = index % hf.expert_layer_period == hf.expert_layer_offset
        layers.append(replace(attention if attends else recurrence, experts=experts if routes else None))
    return llama_like.read_config("jamba", hf, tuple(layers), hf.hidden_act)


def _read_mamba(hf: Any) -> Mamba1:
    require("jamba", "hidden_act", "silu", hf.hidden_act, "the scan computes with SiLU")
    # No published model has them, and with them torch lets padding into a row's convolutions.
    because = "projections of the scan with biases are not implemented"
    require("jamba", "mamba_proj_bias", False, hf.mamba_proj_bias, because)
    # Two of published checkpoints alone; no class declares them.
    fields = hf.to_dict()
    norms, window = fields.get("mamba_inner_layernorms", True), fields.get("sliding_window")
    require("jamba", "mamba_inner_layernorms", True, norms, "what steers the scan is normalised, as in torch")
    require("jamba", "sliding_window", None, window, "torch attends to all tokens")
    return Mamba1(
        width=hf.mamba_expand * hf.hidden_size,
        state_dim=hf.mamba_d_state,
        step_rank=hf.mamba_dt_rank,
        taps=hf.mamba_d_conv,
        taps_bias=hf.mamba_conv_bias,
    )


def _read_experts(hf: Any) -> Experts | None:
    """Experts of some layers; None where there is one alone, an MLP, of which another key tells all the same."""
    count, _ = hf.num_experts, hf.num_experts_per_tok
    if count <= 1:
        return None
    return read_experts("jamba", hf, hf.intermediate_size, renormalize=False, count=count)


def entries(config: TransformerConfig) -> list[Entry]:
    """Every tensor of a Jamba checkpoint."""
    found = llama_like.outer_entries(config, mamba2_like.NAMES)
    for index, layer in enumerate(config.layers):
        name, path = f"model.layers.{index}", f"layers_{index}"
        found += llama_like.block_norm_entries(config, index, mamba2_like.NAMES)
        if isinstance(layer.mixer, Mamba1):
            found += _mamba_entries(config, layer.mixer, f"{name}.mamba", f"{path}/attn")
        else:
            found += attention_entries(config, f"{name}.self_attn", f"{path}/attn")
        name = f"{name}.feed_forward"
        if layer.experts is None:
            found += mlp_entries(config, name, f"{path}/mlp")
        else:
            parts = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj", "router": "router"}
            found += expert_entries(config, layer.experts, name, f"{path}/experts", **parts)
    return found


def _mamba_entries(config: TransformerConfig, sizes: Mamba1, name: str, path: str) -> list[Entry]:
    """Every tensor of a layer of Mamba, "model.layers.0.mamba" and "layers_0/attn"."""
    width, inner, state, rank = config.width, sizes.width, sizes.state_dim, sizes.step_rank
    into = (f"{path}/v", f"{path}/gate")
    steering = (f"{path}/step_down", f"{path}/k", f"{path}/q")
    found = [
        *linear_entries(f"{name}.in_proj", into, width, 2 * inner, bias=False),
        Entry(f"{name}.conv1d.weight", (f"{path}/v_taps",), channels(), (inner, 1, sizes.taps)),
        *linear_entries(f"{name}.x_proj", steering, inner, rank + 2 * state, bias=False),
        *norm_entries(config, f"{name}.dt_layernorm", f"{path}/step_norm", rank),
        *norm_entries(config, f"{name}.b_layernorm", f"{path}/k_norm", state),
        *norm_entries(config, f"{name}.c_layernorm", f"{path}/q_norm", state),
        *linear_entries(f"{name}.dt_proj", (f"{path}/step_up",), rank, inner, bias=False),
        Entry(f"{name}.dt_proj.bias", (f"{path}/step_bias",), vector(), (inner,)),
        Entry(f"{name}.A_log", (f"{path}/log_rates",), turned(), (inner, state)),
        Entry(f"{name}.D", (f"{path}/skip",), vector(), (inner,)),
        *linear_entries(f"{name}.out_proj", (f"{path}/out",), inner, width, bias=False),
    ]
    if sizes.taps_bias:
        found.append(Entry(f"{name}.conv1d.bias", (f"{path}/v_taps_bias",), vector(), (inner,)))
    return found


FAMILY = Family(
    model_type="jamba",
    architecture="JambaForCausalLM",
    read_config=read_config,
    entries=entries,
    base_prefix="model.",
    ignored=llama_like.IGNORED,
)
