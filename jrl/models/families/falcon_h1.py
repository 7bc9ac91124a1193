# SPDX-License-Identifier: Apache-2.0
"""Falcon-H1 (TII 2025, arXiv:2507.22448): attention and Mamba-2 side by side in every layer, and many multipliers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from jrl.models.config import AttentionBesideMamba2, LayerConfig, Mamba2, TransformerConfig
from jrl.models.families import llama_like, mamba2_like
from jrl.models.families.base import Entry, Family, require
from jrl.models.families.rope import read_rope
from jrl.models.families.tables import attention_entries, mlp_entries


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `FalconH1Config`.

    Raises:
      ValueError: If projections of the state space have biases, its groups do not divide its heads, or the activation
        or the scaling of the rotary positions is not implemented.
    """
    head_dim = llama_like.read_head_dim(hf)
    gate, out = hf.mlp_multipliers
    layer = LayerConfig(
        # Keys are multiplied before they are rotated: so are their scores.
        head_dim**-0.5 * hf.key_multiplier,
        rope=read_rope("falcon_h1", hf.rope_parameters, head_dim),
        mixer=AttentionBesideMamba2(_read_mamba(hf), hf.attention_in_multiplier, hf.attention_out_multiplier),
    )
    return replace(
        llama_like.read_config("falcon_h1", hf, (layer,) * hf.num_hidden_layers, hf.hidden_act),
        qkv_bias=hf.attention_bias,
        attention_out_bias=hf.attention_bias,
        mlp_bias=hf.mlp_bias,
        embedding_scale=hf.embedding_multiplier,
        logit_scale=hf.lm_head_multiplier,
        mlp_gate_scale=gate,
        mlp_out_scale=out,
    )


def _read_mamba(hf: Any) -> Mamba2:
    # As in the projections that `read_mamba` knows.
    because = "projections of the state space with biases are not implemented"
    require("falcon_h1", "projectors_bias", False, hf.projectors_bias, because)
    # Nothing comes between the multiplier of the input and that of each part of the projection.
    gate, v, k, q, step = (scale * hf.ssm_in_multiplier for scale in hf.ssm_multipliers)
    norm: Literal["before_gate", "after_gate"] = "before_gate" if hf.mamba_norm_before_gate else "after_gate"
    return replace(
        mamba2_like.read_mamba("falcon_h1", hf, hf.mamba_d_ssm),
        norm=norm if hf.mamba_rms_norm else None,
        gate_scale=gate,
        value_scale=v,
        key_scale=k,
        query_scale=q,
        step_scale=step,
        out_scale=hf.ssm_out_multiplier,
    )


def entries(config: TransformerConfig) -> list[Entry]:
    """Every tensor of a Falcon-H1 checkpoint."""
    found = llama_like.outer_entries(config, mamba2_like.NAMES)
    for index, layer in enumerate(config.layers):
        assert isinstance(layer.mixer, AttentionBesideMamba2)
        name, path = f"model.layers.{index}", f"layers_{index}"
        found += llama_like.block_norm_entries(config, index, mamba2_like.NAMES)
        found += attention_entries(config, f"{name}.self_attn", f"{path}/attn/attn")
        found += mamba2_like.entries(config, layer.mixer.mamba, f"{name}.mamba", f"{path}/attn/mamba")
        found += mlp_entries(config, f"{name}.feed_forward", f"{path}/mlp")
    return found


FAMILY = Family(
    model_type="falcon_h1",
    architecture="FalconH1ForCausalLM",
    read_config=read_config,
    entries=entries,
    base_prefix="model.",
    ignored=llama_like.IGNORED,
)
