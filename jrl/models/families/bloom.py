# SPDX-License-Identifier: Apache-2.0
"""BLOOM (BigScience 2022, arXiv:2211.05100): no positions but ALiBi, and a norm after the embedding."""

from __future__ import annotations

from typing import Any

from jrl.models.config import LayerConfig, TransformerConfig
from jrl.models.families.base import Entry, Family, require
from jrl.models.families.tables import (
    embedding_entries,
    fused_attention_entries,
    head_entries,
    mlp_entries,
    norm_entries,
)

TRAINED_POSITIONS = 2048
"""Context of all published checkpoints; nothing in the architecture ends there."""


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `BloomConfig`.

    Raises:
      ValueError: If the residual stream is taken after the norms.
    """
    option, got = "apply_residual_connection_post_layernorm", hf.apply_residual_connection_post_layernorm
    require("bloom", option, False, got, "a residual stream taken after the norms is not implemented")
    head_dim = hf.hidden_size // hf.n_head
    return TransformerConfig(
        vocab_size=hf.vocab_size,
        width=hf.hidden_size,
        layers=(LayerConfig(head_dim**-0.5),) * hf.n_layer,
        num_heads=hf.n_head,
        num_kv_heads=hf.n_head,
        head_dim=head_dim,
        mlp_width=4 * hf.hidden_size,
        # Published configs say it under a name that `BloomConfig` does not declare.
        max_positions=hf.to_dict().get("seq_length") or TRAINED_POSITIONS,
        activation="gelu_tanh",
        gated_mlp=False,
        norm="layer",
        norm_epsilon=hf.layer_norm_epsilon,
        qkv_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        tie_embeddings=hf.tie_word_embeddings,
        alibi=True,
        embedding_norm=True,
        attention_dropout=hf.attention_dropout,
        residual_dropout=hf.hidden_dropout,
        init_range=hf.initializer_range,
    )


def entries(config: TransformerConfig) -> list[Entry]:
    """Every tensor of a BLOOM checkpoint; q, k and v lie together head by head."""
    found = [
        *embedding_entries(config, "transformer.word_embeddings"),
        *norm_entries(config, "transformer.word_embeddings_layernorm", "embed_norm"),
        *norm_entries(config, "transformer.ln_f", "final_norm"),
        *head_entries(config),
    ]
    for index in range(config.num_layers):
        name, path = f"transformer.h.{index}", f"layers_{index}"
        found += [
            *norm_entries(config, f"{name}.input_layernorm", f"{path}/attn_norm"),
            *norm_entries(config, f"{name}.post_attention_layernorm", f"{path}/mlp_norm"),
            *fused_attention_entries(config, f"{name}.self_attention", f"{path}/attn"),
            *mlp_entries(config, f"{name}.mlp", f"{path}/mlp", up="dense_h_to_4h", down="dense_4h_to_h"),
        ]
    return found


FAMILY = Family(
    model_type="bloom",
    architecture="BloomForCausalLM",
    read_config=read_config,
    entries=entries,
    base_prefix="transformer.",
)
