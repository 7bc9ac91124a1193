# SPDX-License-Identifier: Apache-2.0
"""Qwen 2.5 VL (Bai et al. 2025, arXiv:2502.13923): the text model of it.

Rotary positions have three parts, for time, height and width. In text the three are equal: plain rotary positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jrl.models.config import TransformerConfig
from jrl.models.families import llama_like
from jrl.models.families.multimodal import text_model


def read_text(hf: Any) -> TransformerConfig:
    """Maps a `Qwen2_5_VLTextConfig`.

    Raises:
      ValueError: If the activation, the types of layers, or the scaling of the rotary positions is not implemented.
    """
    layers = llama_like.read_layers("qwen2_5_vl", hf)
    return replace(llama_like.read_config("qwen2_5_vl", hf, layers, hf.hidden_act), qkv_bias=True)


FAMILY = text_model("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", read_text)
