# SPDX-License-Identifier: Apache-2.0
"""Gemma 2 (Riviere et al. 2024, arXiv:2408.00118): soft-caps, norms around every sublayer, alternating windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jrl.models.config import LayerConfig, TransformerConfig
from jrl.models.families import llama_like
from jrl.models.families.base import Family
from jrl.models.families.gemma import read_gemma
from jrl.models.families.rope import read_rope


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `Gemma2Config`.

    Raises:
      ValueError: If attention is bidirectional, or the activation, the types of layers, or the rotary scaling is not
        implemented.
    """
    rope = read_rope("gemma2", hf.rope_parameters, hf.head_dim)
    windows = llama_like.read_windows("gemma2", hf)
    layers = tuple(LayerConfig(hf.query_pre_attn_scalar**-0.5, window, rope) for window in windows)
    return replace(
        read_gemma("gemma2", hf, layers, hf.hidden_activation),
        block="sandwich",
        attention_softcap=hf.attn_logit_softcapping,
        logit_softcap=hf.final_logit_softcapping,
    )


FAMILY = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    read_config=read_config,
    entries=llama_like.entries,
    base_prefix="model.",
    ignored=llama_like.IGNORED,
)
