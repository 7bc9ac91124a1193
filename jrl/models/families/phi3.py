# SPDX-License-Identifier: Apache-2.0
"""Phi-3 and Phi-4 (Abdin et al. 2024, arXiv:2404.14219): LLaMA with q, k, v in one tensor, and gate and up in another.

The long-context checkpoints scale their rotary positions by LongRoPE, with one set of factors for rows up to the
context of the pre-training and another for longer ones. Only the first is used here, so the longest row is
`original_max_position_embeddings`; up to there it is what torch computes. (Torch takes the other set for a whole
batch as soon as one of its rows is longer, so that a row's logits depend on its neighbours.)
"""

from __future__ import annotations

from typing import Any

from jrl.models.config import LayerConfig, TransformerConfig
from jrl.models.families.base import Entry, Family, read_activation
from jrl.models.families.llama_like import read_head_dim
from jrl.models.families.rope import read_longrope, read_rope
from jrl.models.families.tables import (
    attention_out_entries,
    embedding_entries,
    head_entries,
    linear_entries,
    norm_entries,
)


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `Phi3Config`.

    Raises:
      ValueError: If the rotary positions are of a kind that is not implemented.
    """
    head_dim = read_head_dim(hf)
    is_long = hf.rope_parameters["rope_type"] == "longrope"
    if is_long:
        stretched = hf.max_position_embeddings
        rope = read_longrope("phi3", hf.rope_parameters, head_dim, stretched, partial=True)
    else:
        rope = read_rope("phi3", hf.rope_parameters, head_dim, partial=True)
    layer = LayerConfig(head_dim**-0.5, window=hf.sliding_window, rope=rope)
    return TransformerConfig(
        vocab_size=hf.vocab_size,
        width=hf.hidden_size,
        layers=(layer,) * hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=head_dim,
        mlp_width=hf.intermediate_size,
        max_positions=hf.original_max_position_embeddings if is_long else hf.max_position_embeddings,
        activation=read_activation("phi3", hf.hidden_act),
        gated_mlp=True,
        norm="rms",
        norm_epsilon=hf.rms_norm_eps,
        qkv_bias=False,
        attention_out_bias=False,
        mlp_bias=False,
        tie_embeddings=hf.tie_word_embeddings,
        attention_dropout=hf.attention_dropout,
        residual_dropout=hf.resid_pdrop,
        init_range=hf.initializer_range,
    )


def entries(config: TransformerConfig) -> list[Entry]:
    """Every tensor of a Phi-3 checkpoint."""
    width, inner = config.width, config.mlp_width
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    found = [
        *embedding_entries(config, "model.embed_tokens"),
        *norm_entries(config, "model.norm", "final_norm"),
        *head_entries(config),
    ]
    for index in range(config.num_layers):
        name, path = f"model.layers.{index}", f"layers_{index}"
        qkv = tuple(f"{path}/attn/{part}" for part in ("q", "k", "v"))
        gate_up = (f"{path}/mlp/gate", f"{path}/mlp/up")
        found += [
            *norm_entries(config, f"{name}.input_layernorm", f"{path}/attn_norm"),
            *norm_entries(config, f"{name}.post_attention_layernorm", f"{path}/mlp_norm"),
            *linear_entries(f"{name}.self_attn.qkv_proj", qkv, width, heads, bias=False),
            *attention_out_entries(config, f"{name}.self_attn.o_proj", f"{path}/attn"),
            *linear_entries(f"{name}.mlp.gate_up_proj", gate_up, width, 2 * inner, bias=False),
            *linear_entries(f"{name}.mlp.down_proj", (f"{path}/mlp/down",), inner, width, bias=False),
        ]
    return found


FAMILY = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    read_config=read_config,
    entries=entries,
    base_prefix="model.",
    ignored=(r"\.rotary_emb\.inv_freq$",),
)
