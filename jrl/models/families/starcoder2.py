# SPDX-License-Identifier: Apache-2.0
"""StarCoder 2 (Lozhkov et al. 2024, arXiv:2402.19173): LayerNorm, biases, a plain MLP, one window."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from jrl.models.config import LayerConfig, TransformerConfig
from jrl.models.families import llama_like
from jrl.models.families.base import Family
from jrl.models.families.rope import read_rope


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `Starcoder2Config`.

    Raises:
      ValueError: If the activation, or the scaling of the rotary positions, is not implemented.
    """
    head_dim = llama_like.read_head_dim(hf)
    rope = read_rope("starcoder2", hf.rope_parameters, head_dim)
    layers = (LayerConfig(head_dim**-0.5, hf.sliding_window, rope),) * hf.num_hidden_layers
    return replace(
        llama_like.read_config("starcoder2", hf, layers, hf.hidden_act, norm_epsilon=hf.norm_epsilon),
        gated_mlp=False,
        norm="layer",
        qkv_bias=hf.use_bias,
        attention_out_bias=hf.use_bias,
        mlp_bias=hf.use_bias,
        embedding_dropout=hf.embedding_dropout,
        residual_dropout=hf.residual_dropout,
    )


NAMES = llama_like.Names(up="c_fc", down="c_proj")


FAMILY = Family(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    read_config=read_config,
    entries=partial(llama_like.entries, names=NAMES),
    base_prefix="model.",
    ignored=llama_like.IGNORED,
)
