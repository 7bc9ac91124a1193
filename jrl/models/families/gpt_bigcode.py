# SPDX-License-Identifier: Apache-2.0
"""GPT-BigCode (SantaCoder, StarCoder; Ben Allal et al. 2023, arXiv:2301.03988): GPT-2 with one key/value head."""

from __future__ import annotations

from typing import Any

from jrl.models.config import LayerConfig, TransformerConfig
from jrl.models.families.base import (
    Entry,
    Family,
    linear,
    linear_by_head,
    read_activation,
    require,
    vector,
    vector_by_head,
)
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
    """Maps a `GPTBigCodeConfig`.

    Raises:
      ValueError: If the config asks for cross-attention.
    """
    alone = "a decoder alone has nothing to attend to"
    require("gpt_bigcode", "add_cross_attention", False, hf.add_cross_attention, alone)
    head_dim = hf.n_embd // hf.n_head
    return TransformerConfig(
        vocab_size=hf.vocab_size,
        width=hf.n_embd,
        layers=(LayerConfig(head_dim**-0.5 if hf.scale_attn_weights else 1.0),) * hf.n_layer,
        num_heads=hf.n_head,
        num_kv_heads=1 if hf.multi_query else hf.n_head,
        head_dim=head_dim,
        mlp_width=hf.n_inner if hf.n_inner is not None else 4 * hf.n_embd,
        max_positions=hf.n_positions,
        activation=read_activation("gpt_bigcode", hf.activation_function),
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
    """Every tensor of a GPT-BigCode checkpoint. With one key/value head q, k and v lie side by side, else by head."""
    width, fused = config.width, config.width + 2 * config.num_kv_heads * config.head_dim
    by_head = config.num_kv_heads == config.num_heads
    weight, bias = (linear_by_head(), vector_by_head()) if by_head else (linear(), vector())
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
            *linear_entries(
                f"{name}.attn.c_attn", qkv, width, fused, bias=True, weight=weight, bias_vector=bias
            ),
            *attention_out_entries(config, f"{name}.attn.c_proj", f"{path}/attn"),
            *mlp_entries(config, f"{name}.mlp", f"{path}/mlp", up="c_fc", down="c_proj"),
        ]
    return found


FAMILY = Family(
    model_type="gpt_bigcode",
    architecture="GPTBigCodeForCausalLM",
    read_config=read_config,
    entries=entries,
    base_prefix="transformer.",
    ignored=(r"^transformer\.bias$", r"\.attn\.bias$", r"\.attn\.masked_bias$"),
)
