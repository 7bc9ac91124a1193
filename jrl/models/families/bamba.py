# SPDX-License-Identifier: Apache-2.0
"""Bamba (IBM, Princeton, CMU and UIUC 2024): Mamba-2 in most layers, attention in few, an MLP in all.

Half of a head rotates. The torch model's loss on the size of logits (`z_loss_coefficient`) is left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jrl.models.config import LayerConfig, TransformerConfig
from jrl.models.families import llama_like, mamba2_like
from jrl.models.families.base import Entry, Family
from jrl.models.families.rope import read_rope
from jrl.models.families.tables import mlp_entries


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `BambaConfig`.

    Raises:
      ValueError: If projections of the state space have biases, its groups do not divide its heads, or the activation
        or the scaling of the rotary positions is not implemented.
    """
    head_dim = llama_like.read_head_dim(hf)
    plain = LayerConfig(head_dim**-0.5)
    attention = replace(plain, rope=read_rope("bamba", hf.rope_parameters, head_dim, partial=True))
    recurrence = replace(plain, mixer=mamba2_like.read_mamba("bamba", hf))
    attends = hf.attn_layer_indices or ()
    layers = tuple(attention if index in attends else recurrence for index in range(hf.num_hidden_layers))
    return replace(
        llama_like.read_config("bamba", hf, layers, hf.hidden_act),
        qkv_bias=hf.attention_bias,
        attention_out_bias=hf.attention_bias,
        mlp_bias=hf.mlp_bias,
    )


def entries(config: TransformerConfig) -> list[Entry]:
    """Every tensor of a Bamba checkpoint."""
    found = llama_like.outer_entries(config, mamba2_like.NAMES)
    for index, layer in enumerate(config.layers):
        name, path = f"model.layers.{index}", f"layers_{index}"
        found += llama_like.block_norm_entries(config, index, mamba2_like.NAMES)
        found += mamba2_like.mixer_entries(config, layer, name, path)
        found += mlp_entries(config, f"{name}.feed_forward", f"{path}/mlp")
    return found


FAMILY = Family(
    model_type="bamba",
    architecture="BambaForCausalLM",
    read_config=read_config,
    entries=entries,
    base_prefix="model.",
    ignored=llama_like.IGNORED,
)
