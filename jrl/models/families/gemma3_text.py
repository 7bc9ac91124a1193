# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 without its eyes (Kamath et al. 2025, arXiv:2503.19786): five local layers to a global one, q/k norm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jrl.models.config import LayerConfig, TransformerConfig
from jrl.models.families import llama_like
from jrl.models.families.base import Family, require
from jrl.models.families.gemma import read_gemma
from jrl.models.families.rope import read_rope, without_truncate


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `Gemma3TextConfig`, which has rotary positions for each type of layer.

    Raises:
      ValueError: If attention is bidirectional or soft-capped, or the activation, the types of layers, or a rotary
        scaling is not implemented.
    """
    ignored = "the torch model ignores it"
    require("gemma3_text", "attn_logit_softcapping", None, hf.attn_logit_softcapping, ignored)
    windows = llama_like.read_windows("gemma3_text", hf)
    layers = tuple(
        LayerConfig(
            hf.query_pre_attn_scalar**-0.5,
            window,
            read_rope("gemma3_text", without_truncate(hf.rope_parameters[kind]), hf.head_dim),
        )
        for kind, window in zip(hf.layer_types, windows, strict=True)
    )
    return replace(
        read_gemma("gemma3_text", hf, layers, hf.hidden_activation),
        block="sandwich",
        qk_norm="head",
        logit_softcap=hf.final_logit_softcapping,
    )


FAMILY = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    read_config=read_config,
    entries=llama_like.entries,
    base_prefix="model.",
    ignored=llama_like.IGNORED,
    classifier="Gemma3TextForSequenceClassification",
)
