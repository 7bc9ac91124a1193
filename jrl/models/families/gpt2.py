# SPDX-License-Identifier: Apache-2.0
"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm, tied head, one qkv matrix stored (in, out)."""

from __future__ import annotations

from typing import Any

from jrl.models.config import LayerConfig, TransformerConfig
from jrl.models.families.base import Entry, Family, conv1d, read_activation, require
from jrl.models.families.tables import (
    attention_out_entries,
    embedding_entries,
    head_entries,
    linear_entries,
    mlp_entries,
    norm_entries,
    position_entries,
)


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `GPT2Config`.

    Raises:
      ValueError: If the config asks for cross-attention.
    """
    alone = "a decoder alone has nothing to attend to"
    require("gpt2", "add_cross_attention", False, hf.add_cross_attention, alone)
    scale = (hf.n_embd // hf.n_head) ** -0.5 if hf.scale_attn_weights else 1.0
    by_layer = hf.scale_attn_by_inverse_layer_idx
    return TransformerConfig(
        vocab_size=hf.vocab_size,
        width=hf.n_embd,
        layers=tuple(LayerConfig(scale / (index + 1 if by_layer else 1)) for index in range(hf.n_layer)),
        num_heads=hf.n_head,
        num_kv_heads=hf.n_head,
        head_dim=hf.n_embd // hf.n_head,
        mlp_width=hf.n_inner if hf.n_inner is not None else 4 * hf.n_embd,
        max_positions=hf.n_positions,
        activation=read_activation("gpt2", hf.activation_function),
        gated_mlp=False,
        norm="layer",
        norm_epsilon=hf.layer_norm_epsilon,
        learned_positions=True,
        qkv_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        tie_embeddings=hf.tie_word_embeddings,
        embedding_dropout=hf.embd_pdrop,
        attention_dropout=hf.attn_pdrop,
        residual_dropout=hf.resid_pdrop,
        init_range=hf.initializer_range,
        scale_residual_init=True,
    )


def entries(config: TransformerConfig) -> list[Entry]:
    """Every tensor of a GPT-2 checkpoint."""
    width = config.width
    found = [
        *embedding_entries(config, "transformer.wte"),
        *position_entries(config, "transformer.wpe"),
        *norm_entries(config, "transformer.ln_f", "final_norm"),
        *head_entries(config),
    ]
    for index in range(config.num_layers):
        name, path = f"transformer.h.{index}", f"layers_{index}"
        qkv = tuple(f"{path}/attn/{part}" for part in ("q", "k", "v"))
        found += [
            *norm_entries(config, f"{name}.ln_1", f"{path}/attn_norm"),
            *norm_entries(config, f"{name}.ln_2", f"{path}/mlp_norm"),
            *linear_entries(f"{name}.attn.c_attn", qkv, width, 3 * width, bias=True, weight=conv1d()),
            *attention_out_entries(config, f"{name}.attn.c_proj", f"{path}/attn", conv1d),
            *mlp_entries(config, f"{name}.mlp", f"{path}/mlp", up="c_fc", down="c_proj", weight=conv1d),
        ]
    return found


FAMILY = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    read_config=read_config,
    entries=entries,
    base_prefix="transformer.",
    ignored=(r"\.attn\.bias$", r"\.attn\.masked_bias$"),
)
