# SPDX-License-Identifier: Apache-2.0
"""StableLM (Bellagente et al. 2024, arXiv:2402.17834): LLaMA with LayerNorm; a quarter of each head rotates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jrl.models.config import LayerConfig, TransformerConfig
from jrl.models.families import llama_like
from jrl.models.families.base import Entry, Family, require, table
from jrl.models.families.rope import read_rope
from jrl.models.families.tables import mlp_entries


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `StableLmConfig`.

    Raises:
      ValueError: If there is dropout after the MLP, or the activation or the rotary scaling is not implemented.
    """
    alone = "the torch model drops what the MLP adds, and not what attention adds"
    require("stablelm", "hidden_dropout", 0.0, hf.hidden_dropout, alone)
    head_dim = hf.hidden_size // hf.num_attention_heads
    rope = read_rope("stablelm", hf.rope_parameters, head_dim, partial=True)
    layers = (LayerConfig(head_dim**-0.5, rope=rope),) * hf.num_hidden_layers
    return replace(
        llama_like.read_config("stablelm", hf, layers, hf.hidden_act, norm_epsilon=hf.layer_norm_eps),
        block="parallel" if hf.use_parallel_residual else "pre_norm",
        norm="layer",
        qkv_bias=hf.use_qkv_bias,
        qk_norm="own_head" if hf.qk_layernorm else None,
    )


def entries(config: TransformerConfig) -> list[Entry]:
    """Every tensor of a StableLM checkpoint, which has one for the norm of each head."""
    found = llama_like.outer_entries(config)
    for index in range(config.num_layers):
        name, path = f"model.layers.{index}", f"layers_{index}"
        found += llama_like.attention_block_entries(replace(config, qk_norm=None), index)
        found += mlp_entries(config, f"{name}.mlp", f"{path}/mlp")
        for part, heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
            norms, scale = f"{name}.self_attn.{part}_layernorm.norms", f"{path}/attn/{part}_norm/scale"
            for head in range(heads if config.qk_norm is not None else 0):
                found.append(Entry(f"{norms}.{head}.weight", (scale,), table(), (config.head_dim,), head))
    return found


FAMILY = Family(
    model_type="stablelm",
    architecture="StableLmForCausalLM",
    read_config=read_config,
    entries=entries,
    base_prefix="model.",
    ignored=llama_like.IGNORED,
)
