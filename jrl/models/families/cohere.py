# SPDX-License-Identifier: Apache-2.0
"""Command R (Cohere 2024): attention and MLP in parallel, LayerNorm without bias, interleaved rotary positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jrl.models.config import LayerConfig, TransformerConfig
from jrl.models.families import llama_like
from jrl.models.families.base import Family
from jrl.models.families.rope import read_rope


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `CohereConfig`.

    Raises:
      ValueError: If the activation, or the scaling of the rotary positions, is not implemented.
    """
    head_dim = llama_like.read_head_dim(hf)
    rope = read_rope("cohere", hf.rope_parameters, head_dim, interleaved=True)
    layers = (LayerConfig(head_dim**-0.5, rope=rope),) * hf.num_hidden_layers
    return replace(read_cohere("cohere", hf, layers), qk_norm="own_head" if hf.use_qk_norm else None)


def read_cohere(model_type: str, hf: Any, layers: tuple[LayerConfig, ...]) -> TransformerConfig:
    """Reads the config fields that both generations share; arguments as of `llama_like.read_config`.

    Raises:
      ValueError: If the activation is not implemented.
    """
    return replace(
        llama_like.read_config(model_type, hf, layers, hf.hidden_act, norm_epsilon=hf.layer_norm_eps),
        block="parallel",
        norm="layer_no_bias",
        qkv_bias=hf.attention_bias,
        attention_out_bias=hf.attention_bias,
        logit_scale=hf.logit_scale,
    )


FAMILY = Family(
    model_type="cohere",
    architecture="CohereForCausalLM",
    read_config=read_config,
    entries=llama_like.entries,
    base_prefix="model.",
    ignored=llama_like.IGNORED,
)
