# SPDX-License-Identifier: Apache-2.0
"""Phi-1 to Phi-2 (Li et al. 2023, arXiv:2309.05463): attention and MLP in parallel, and biases, the head's too."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from jrl.models.config import LayerConfig, TransformerConfig
from jrl.models.families import llama_like
from jrl.models.families.base import Family, require
from jrl.models.families.rope import read_rope


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `PhiConfig`.

    Raises:
      ValueError: If the head is tied to the embedding, or the activation or the rotary scaling is not implemented.
    """
    require("phi", "tie_word_embeddings", False, hf.tie_word_embeddings, "its head has a bias of its own")
    head_dim = llama_like.read_head_dim(hf)
    rope = read_rope("phi", hf.rope_parameters, head_dim, partial=True)
    layers = (LayerConfig(head_dim**-0.5, rope=rope),) * hf.num_hidden_layers
    return replace(
        llama_like.read_config("phi", hf, layers, hf.hidden_act, norm_epsilon=hf.layer_norm_eps),
        block="parallel",
        gated_mlp=False,
        norm="layer",
        qk_norm="head" if hf.qk_layernorm else None,
        qkv_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        head_bias=True,
        embedding_dropout=hf.embd_pdrop,
        residual_dropout=hf.resid_pdrop,
    )


NAMES = llama_like.Names(
    final_norm="final_layernorm",
    qk_norms=("q_layernorm", "k_layernorm"),
    out="dense",
    up="fc1",
    down="fc2",
)


FAMILY = Family(
    model_type="phi",
    architecture="PhiForCausalLM",
    read_config=read_config,
    entries=partial(llama_like.entries, names=NAMES),
    base_prefix="model.",
    ignored=llama_like.IGNORED,
)
