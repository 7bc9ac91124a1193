# SPDX-License-Identifier: Apache-2.0
"""Nemotron-H and Nemotron 3 (NVIDIA 2025, arXiv:2504.03624): every layer is one sublayer.

It is Mamba-2, attention, an MLP, or DeepSeek-V3's experts without gates, which may read and answer short vectors.
Attention has no positions; activations are squared ReLU. Tensors of the multi-token prediction (`mtp`) are left out, as
transformers does.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from jrl.models.config import Experts, LayerConfig, Mamba2, TransformerConfig
from jrl.models.families import llama_like, mamba2_like
from jrl.models.families.base import Entry, Family, read_activation, require
from jrl.models.families.deepseek_v3 import read_grouped_experts
from jrl.models.families.mixtral import expert_entries
from jrl.models.families.tables import (
    attention_entries,
    embedding_entries,
    head_entries,
    linear_entries,
    mlp_entries,
    norm_entries,
)


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `NemotronHConfig`.

    Raises:
      ValueError: If projections of the state space have biases, its groups do not divide its heads, the head is tied,
        numbers of experts do not fit together, or an activation or a type of layer is not implemented.
    """
    # torch keeps two tables whatever the config says.
    require("nemotron_h", "tie_word_embeddings", False, hf.tie_word_embeddings, "the head is one of its own")
    scale = hf.head_dim**-0.5
    kinds = {
        "linear_attention": LayerConfig(scale, mixer=_read_mamba(hf), only="mixer"),
        "full_attention": LayerConfig(scale, only="mixer"),
        "mlp": LayerConfig(scale, only="feed_forward"),
        "moe": LayerConfig(scale, experts=_read_experts(hf), only="feed_forward"),
    }
    return TransformerConfig(
        vocab_size=hf.vocab_size,
        width=hf.hidden_size,
        layers=llama_like.read_kinds("nemotron_h", hf, kinds),
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=hf.head_dim,
        mlp_width=hf.intermediate_size,
        max_positions=hf.max_position_embeddings,
        activation=read_activation("nemotron_h", hf.mlp_hidden_act),
        gated_mlp=False,
        norm="rms",
        norm_epsilon=hf.layer_norm_epsilon,
        qkv_bias=False,
        attention_out_bias=False,
        mlp_bias=hf.mlp_bias,
        tie_embeddings=False,
        attention_dropout=hf.attention_dropout,
        init_range=hf.initializer_range,
    )


def _read_mamba(hf: Any) -> Mamba2:
    # No published model has them, and with them torch lets padding into a row's convolutions.
    because = "projections of the state space with biases are not implemented"
    require("nemotron_h", "use_bias", False, hf.use_bias, because)
    require("nemotron_h", "mamba_hidden_act", "silu", hf.mamba_hidden_act, "the gates are SiLU")
    mamba2_like.check_groups("nemotron_h", "n_groups", hf.n_groups, hf.mamba_num_heads)
    return Mamba2(
        heads=hf.mamba_num_heads,
        head_dim=hf.mamba_head_dim,
        groups=hf.n_groups,
        state_dim=hf.ssm_state_size,
        taps=hf.conv_kernel,
        taps_bias=hf.use_conv_bias,
        # Of whole rows. torch's step of decoding has no limits; here it has those of the rows that learners score.
        step_limits=(hf.time_step_min, math.inf),
    )


def _read_experts(hf: Any) -> Experts:
    # The MLP that all tokens visit has a width of its own, however many experts it stands for.
    return replace(
        read_grouped_experts("nemotron_h", hf),
        shared_width=hf.moe_shared_expert_intermediate_size,
        gated=False,
        latent_width=hf.moe_latent_size,
    )


def entries(config: TransformerConfig) -> list[Entry]:
    """Every tensor of a Nemotron-H checkpoint."""
    found = [
        *embedding_entries(config, "model.embeddings"),
        *norm_entries(config, "model.norm_f", "final_norm"),
        *head_entries(config),
    ]
    for index, layer in enumerate(config.layers):
        name, path = f"model.layers.{index}", f"layers_{index}"
        norm = "mlp_norm" if layer.only == "feed_forward" else "attn_norm"
        found += norm_entries(config, f"{name}.norm", f"{path}/{norm}")
        if layer.experts is not None:
            found += _expert_entries(config, layer.experts, f"{name}.mixer", path)
        elif layer.only == "feed_forward":
            found += mlp_entries(config, f"{name}.mixer", f"{path}/mlp")
        elif isinstance(layer.mixer, Mamba2):
            found += mamba2_like.entries(config, layer.mixer, f"{name}.mixer", f"{path}/attn")
        else:
            found += attention_entries(config, f"{name}.mixer", f"{path}/attn")
    return found


def _expert_entries(config: TransformerConfig, experts: Experts, name: str, path: str) -> list[Entry]:
    parts: dict[str, Any] = {"gate": None, "up": "up_proj", "down": "down_proj"}
    found = expert_entries(config, experts, name, f"{path}/experts", **parts)
    shared = replace(config, mlp_width=experts.shared_width or config.mlp_width)
    found += mlp_entries(shared, f"{name}.shared_experts", f"{path}/shared_mlp")
    if experts.latent_width is not None:
        width, latent, bias = config.width, experts.latent_width, config.mlp_bias
        down, up = f"{path}/experts/latent_down", f"{path}/experts/latent_up"
        found += linear_entries(f"{name}.fc1_latent_proj", (down,), width, latent, bias=bias)
        found += linear_entries(f"{name}.fc2_latent_proj", (up,), latent, width, bias=bias)
    return found


FAMILY = Family(
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    read_config=read_config,
    entries=entries,
    base_prefix="model.",
    file_prefix="backbone.",
    ignored=(r"^mtp\.",),
)
