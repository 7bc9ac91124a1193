# SPDX-License-Identifier: Apache-2.0
"""GPT-J (Wang and Komatsuzaki 2021): attention and MLP in parallel, interleaved rotary positions, a head with bias."""

from __future__ import annotations

from typing import Any

from jrl.models.config import LayerConfig, Rope, TransformerConfig
from jrl.models.families.base import Entry, Family, read_activation, require
from jrl.models.families.tables import (
    attention_entries,
    embedding_entries,
    head_entries,
    mlp_entries,
    norm_entries,
)


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `GPTJConfig`.

    Raises:
      ValueError: If the head is tied to the embedding.
    """
    require("gptj", "tie_word_embeddings", False, hf.tie_word_embeddings, "its head has a bias of its own")
    head_dim = hf.n_embd // hf.n_head
    rope = Rope(10_000.0, dim=hf.rotary_dim, interleaved=True, is_bounded=True)
    return TransformerConfig(
        vocab_size=hf.vocab_size,
        width=hf.n_embd,
        layers=(LayerConfig(head_dim**-0.5, rope=rope),) * hf.n_layer,
        num_heads=hf.n_head,
        num_kv_heads=hf.n_head,
        head_dim=head_dim,
        mlp_width=hf.n_inner if hf.n_inner is not None else 4 * hf.n_embd,
        max_positions=hf.n_positions,
        activation=read_activation("gptj", hf.activation_function),
        gated_mlp=False,
        norm="layer",
        norm_epsilon=hf.layer_norm_epsilon,
        block="parallel",
        qkv_bias=False,
        attention_out_bias=False,
        mlp_bias=True,
        tie_embeddings=False,
        head_bias=True,
        embedding_dropout=hf.embd_pdrop,
        attention_dropout=hf.attn_pdrop,
        residual_dropout=hf.resid_pdrop,
        init_range=hf.initializer_range,
    )


def entries(config: TransformerConfig) -> list[Entry]:
    """Every tensor of a GPT-J checkpoint."""
    found = [
        *embedding_entries(config, "transformer.wte"),
        *norm_entries(config, "transformer.ln_f", "final_norm"),
        *head_entries(config),
    ]
    for index in range(config.num_layers):
        name, path = f"transformer.h.{index}", f"layers_{index}"
        found += [
            *norm_entries(config, f"{name}.ln_1", f"{path}/attn_norm"),
            *attention_entries(config, f"{name}.attn", f"{path}/attn", out="out_proj"),
            *mlp_entries(config, f"{name}.mlp", f"{path}/mlp", up="fc_in", down="fc_out"),
        ]
    return found


FAMILY = Family(
    model_type="gptj",
    architecture="GPTJForCausalLM",
    read_config=read_config,
    entries=entries,
    base_prefix="transformer.",
    ignored=(r"\.attn\.bias$", r"\.attn\.masked_bias$"),
)
