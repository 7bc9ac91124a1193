# SPDX-License-Identifier: Apache-2.0
"""Families of models, a file for each Hugging Face `model_type`: its config mapping and its table of tensors."""

from __future__ import annotations

from types import MappingProxyType

from jrl.models.families import (
    bert,
    bloom,
    deepseek_v3,
    distilbert,
    gemma,
    gemma2,
    gemma3_text,
    glm4_moe,
    glm4_moe_lite,
    gpt2,
    gpt_bigcode,
    gpt_neo,
    gpt_neox,
    gptj,
    lfm2,
    llama,
    mistral,
    mixtral,
    olmo2,
    opt,
    phi3,
    qwen2,
    qwen3,
    qwen3_5_moe_text,
    qwen3_5_text,
    qwen3_moe,
    qwen3_next,
    roberta,
    smollm3,
    t5,
)
from jrl.models.families.base import Entry, Family, Shape

__all__ = ["FAMILIES", "Entry", "Family", "Shape", "find_family"]

FAMILIES = MappingProxyType(
    {
        family.model_type: family
        for family in (
            bert.FAMILY,
            bloom.FAMILY,
            deepseek_v3.FAMILY,
            distilbert.FAMILY,
            gemma.FAMILY,
            gemma2.FAMILY,
            gemma3_text.FAMILY,
            glm4_moe.FAMILY,
            glm4_moe_lite.FAMILY,
            gpt2.FAMILY,
            gpt_bigcode.FAMILY,
            gpt_neo.FAMILY,
            gpt_neox.FAMILY,
            gptj.FAMILY,
            lfm2.FAMILY,
            llama.FAMILY,
            mistral.FAMILY,
            mixtral.FAMILY,
            olmo2.FAMILY,
            opt.FAMILY,
            phi3.FAMILY,
            qwen2.FAMILY,
            qwen3.FAMILY,
            qwen3_5_moe_text.FAMILY,
            qwen3_5_text.FAMILY,
            qwen3_moe.FAMILY,
            qwen3_next.FAMILY,
            roberta.FAMILY,
            smollm3.FAMILY,
            t5.FAMILY,
        )
    }
)


def find_family(model_type: str) -> Family:
    """The family of a `model_type`.

    Raises:
      ValueError: If there is none; the message lists those there are.
    """
    if model_type not in FAMILIES:
        text = f"{model_type}_text"
        part = f" Of {model_type} that is its text model, {text!r}." if text in FAMILIES else ""
        raise ValueError(
            f"`model_type` {model_type!r} is not supported; supported are: {', '.join(sorted(FAMILIES))}.{part}"
        )
    return FAMILIES[model_type]
