# SPDX-License-Identifier: Apache-2.0
"""The language model of Qwen 3.5 with a mixture of experts (Qwen team 2026) in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jrl.models.config import TransformerConfig
from jrl.models.families import qwen3_5_text, qwen3_next
from jrl.models.families.base import Family
from jrl.models.families.mixtral import read_experts
from jrl.models.families.qwen2_moe import with_shared_expert


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `Qwen3_5MoeTextConfig`.

    Raises:
      ValueError: If heads or experts do not fit together, or the activation, a type of layer or the scaling of the
        rotary positions is not implemented.
    """
    width, count = hf.moe_intermediate_size, hf.num_experts
    routed = read_experts("qwen3_5_moe_text", hf, width, renormalize=True, count=count)
    experts = with_shared_expert(hf, routed)
    layers = tuple(
        replace(layer, experts=experts) for layer in qwen3_next.read_layers("qwen3_5_moe_text", hf)
    )
    # No layer has a plain MLP: the width is that of the one which all tokens share.
    return qwen3_next.read_hybrid("qwen3_5_moe_text", hf, layers, hf.shared_expert_intermediate_size)


FAMILY = Family(
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    read_config=read_config,
    entries=qwen3_5_text.entries,
    base_prefix="model.",
    ignored=qwen3_next.IGNORED,
)
