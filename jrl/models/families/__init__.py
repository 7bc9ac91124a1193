# SPDX-License-Identifier: Apache-2.0
"""Families of models, a file for each Hugging Face `model_type`: its config mapping and its table of tensors."""

from __future__ import annotations

from types import MappingProxyType

from jrl.models.families import (
    arcee,
    bamba,
    bert,
    bloom,
    cohere,
    cohere2,
    deepseek_v3,
    distilbert,
    ernie4_5,
    exaone4,
    falcon,
    falcon_h1,
    gemma,
    gemma2,
    gemma3,
    gemma3_text,
    gemma4,
    gemma4_text,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    gpt2,
    gpt_bigcode,
    gpt_neo,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    granitemoehybrid,
    hunyuan_v1_dense,
    jamba,
    kimi_linear,
    lfm2,
    llama,
    llama4,
    llama4_text,
    ministral,
    ministral3,
    mistral,
    mistral3,
    mixtral,
    mt5,
    nemotron,
    nemotron_h,
    olmo2,
    olmo3,
    opt,
    phi,
    phi3,
    qwen2,
    qwen2_5_vl,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_5_moe_text,
    qwen3_5_text,
    qwen3_moe,
    qwen3_next,
    qwen3_vl,
    roberta,
    seed_oss,
    smollm3,
    stablelm,
    starcoder2,
    t5,
    umt5,
)
from jrl.models.families.base import Entry, Family, Shape
from jrl.suggestions import did_you_mean

__all__ = ["FAMILIES", "READ_AS", "Entry", "Family", "Shape", "find_family", "unsupported"]

FAMILIES = MappingProxyType(
    {
        family.model_type: family
        for family in (
            arcee.FAMILY,
            bamba.FAMILY,
            bert.FAMILY,
            bloom.FAMILY,
            deepseek_v3.FAMILY,
            cohere.FAMILY,
            cohere2.FAMILY,
            distilbert.FAMILY,
            ernie4_5.FAMILY,
            exaone4.FAMILY,
            falcon.FAMILY,
            falcon_h1.FAMILY,
            gemma.FAMILY,
            gemma2.FAMILY,
            gemma3.FAMILY,
            gemma3_text.FAMILY,
            gemma4.FAMILY,
            gemma4_text.FAMILY,
            glm4_moe.FAMILY,
            glm4_moe_lite.FAMILY,
            glm4.FAMILY,
            gpt2.FAMILY,
            gpt_bigcode.FAMILY,
            gpt_neo.FAMILY,
            gpt_neox.FAMILY,
            gpt_oss.FAMILY,
            gptj.FAMILY,
            lfm2.FAMILY,
            granite.FAMILY,
            granitemoehybrid.FAMILY,
            hunyuan_v1_dense.FAMILY,
            jamba.FAMILY,
            kimi_linear.FAMILY,
            llama.FAMILY,
            llama4.FAMILY,
            llama4_text.FAMILY,
            ministral.FAMILY,
            ministral3.FAMILY,
            mistral.FAMILY,
            mistral3.FAMILY,
            mixtral.FAMILY,
            mt5.FAMILY,
            nemotron.FAMILY,
            nemotron_h.FAMILY,
            olmo2.FAMILY,
            olmo3.FAMILY,
            opt.FAMILY,
            phi.FAMILY,
            phi3.FAMILY,
            qwen2.FAMILY,
            qwen2_5_vl.FAMILY,
            qwen2_moe.FAMILY,
            qwen3.FAMILY,
            qwen3_5.FAMILY,
            qwen3_5_moe.FAMILY,
            qwen3_5_moe_text.FAMILY,
            qwen3_5_text.FAMILY,
            qwen3_moe.FAMILY,
            qwen3_next.FAMILY,
            qwen3_vl.FAMILY,
            roberta.FAMILY,
            seed_oss.FAMILY,
            smollm3.FAMILY,
            stablelm.FAMILY,
            starcoder2.FAMILY,
            t5.FAMILY,
            umt5.FAMILY,
        )
    }
)
READ_AS = MappingProxyType({"kimi_k2": "deepseek_v3"})
"""A `model_type` that transformers has no class for → the one whose keys and tensors it has. It is written as that."""


def find_family(model_type: str) -> Family:
    """The family of a `model_type`.

    Raises:
      ValueError: If there is none; the message lists those there are, and names the closest.
    """
    if model_type not in FAMILIES:
        raise ValueError(unsupported(model_type))
    return FAMILIES[model_type]


def unsupported(model_type: object) -> str:
    """Message for a `model_type` that has no family here."""
    text = f"{model_type}_text"
    part = f" Of {model_type} that is its text model, {text!r}." if text in FAMILIES else ""
    known = sorted((*FAMILIES, *READ_AS))
    near = part or did_you_mean(model_type, known)
    return f"`model_type` {model_type!r} is not supported; supported are: {', '.join(known)}.{near}"
