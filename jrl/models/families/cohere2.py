# SPDX-License-Identifier: Apache-2.0
"""Command R7B and Command A (Cohere 2024): Command R with windows; layers that see everything have no positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jrl.models.config import LayerConfig, TransformerConfig
from jrl.models.families import llama_like
from jrl.models.families.base import Family
from jrl.models.families.cohere import read_cohere
from jrl.models.families.rope import read_rope


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `Cohere2Config`.

    Raises:
      ValueError: If the activation, the types of layers, or the scaling of the rotary positions is not implemented.
    """
    head_dim = llama_like.read_head_dim(hf)
    rope = read_rope("cohere2", hf.rope_parameters, head_dim, interleaved=True)
    plain = LayerConfig(head_dim**-0.5)
    layers = tuple(
        plain if window is None else replace(plain, window=window, rope=rope)
        for window in llama_like.read_windows("cohere2", hf)
    )
    return read_cohere("cohere2", hf, layers)


FAMILY = Family(
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    read_config=read_config,
    entries=llama_like.entries,
    base_prefix="model.",
    ignored=llama_like.IGNORED,
)
