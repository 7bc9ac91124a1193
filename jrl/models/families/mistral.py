# SPDX-License-Identifier: Apache-2.0
"""Mistral (Jiang et al. 2023, arXiv:2310.06825): LLaMA with a sliding window in every layer, or in none."""

from __future__ import annotations

from typing import Any

from jrl.models.config import LayerConfig, TransformerConfig
from jrl.models.families import llama_like
from jrl.models.families.base import Family
from jrl.models.families.rope import read_rope


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `MistralConfig`.

    Raises:
      ValueError: If the activation, or the scaling of the rotary positions, is not implemented.
    """
    head_dim = llama_like.read_head_dim(hf)
    layer = LayerConfig(head_dim**-0.5, hf.sliding_window, read_rope("mistral", hf.rope_parameters, head_dim))
    return llama_like.read_config("mistral", hf, (layer,) * hf.num_hidden_layers, hf.hidden_act)


FAMILY = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    read_config=read_config,
    entries=llama_like.entries,
    base_prefix="model.",
    ignored=llama_like.IGNORED,
)
