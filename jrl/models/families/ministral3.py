# SPDX-License-Identifier: Apache-2.0
"""Ministral 3 (Mistral AI 2025): Mistral with YaRN, and queries that grow beyond the context of the pre-training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jrl.models.config import LayerConfig, TransformerConfig
from jrl.models.families import llama_like
from jrl.models.families.base import Family
from jrl.models.families.rope import read_query_growth, read_rope


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `Ministral3Config`.

    Raises:
      ValueError: If the activation or the scaling of the rotary positions is not implemented, or the growth of the
        queries lacks a number.
    """
    head_dim = llama_like.read_head_dim(hf)
    growth = read_query_growth("ministral3", hf.rope_parameters)
    rope = replace(read_rope("ministral3", hf.rope_parameters, head_dim), query_growth=growth)
    layer = LayerConfig(head_dim**-0.5, hf.sliding_window, rope)
    return llama_like.read_config("ministral3", hf, (layer,) * hf.num_hidden_layers, hf.hidden_act)


FAMILY = Family(
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    read_config=read_config,
    entries=llama_like.entries,
    base_prefix="model.",
    ignored=llama_like.IGNORED,
)
