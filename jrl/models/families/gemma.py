# SPDX-License-Identifier: Apache-2.0
"""Gemma (Mesnard et al. 2024, arXiv:2403.08295): norms that multiply by 1 + scale, and a scaled embedding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jrl.models.config import LayerConfig, TransformerConfig
from jrl.models.families import llama_like
from jrl.models.families.base import Family, require
from jrl.models.families.rope import read_rope


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `GemmaConfig`.

    Raises:
      ValueError: If attention is bidirectional, or the activation or the rotary scaling is not implemented.
    """
    layer = LayerConfig(hf.head_dim**-0.5, rope=read_rope("gemma", hf.rope_parameters, hf.head_dim))
    return read_gemma("gemma", hf, (layer,) * hf.num_hidden_layers, hf.hidden_act)


def read_gemma(
    model_type: str, hf: Any, layers: tuple[LayerConfig, ...], activation: str
) -> TransformerConfig:
    """Reads the config fields that all generations of Gemma share; arguments as of `llama_like.read_config`.

    Raises:
      ValueError: If attention is bidirectional, or the activation is not implemented.
    """
    bidirectional = bool(hf.use_bidirectional_attention)
    require(
        model_type,
        "use_bidirectional_attention",
        False,
        bidirectional,
        "a language model reads backwards only",
    )
    return replace(
        llama_like.read_config(model_type, hf, layers, activation),
        norm="rms_plus_one",
        embedding_scale=hf.hidden_size**0.5,
        qkv_bias=hf.attention_bias,
        attention_out_bias=hf.attention_bias,
    )


FAMILY = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    read_config=read_config,
    entries=llama_like.entries,
    base_prefix="model.",
    ignored=llama_like.IGNORED,
)
