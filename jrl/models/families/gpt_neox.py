# SPDX-License-Identifier: Apache-2.0
"""GPT-NeoX (Black et al. 2022, arXiv:2204.06745; Pythia): part of each head rotates, attention and MLP in parallel."""

from __future__ import annotations

from typing import Any

from jrl.models.config import LayerConfig, TransformerConfig
from jrl.models.families.base import (
    Entry,
    Family,
    read_activation,
    require,
)
from jrl.models.families.rope import read_rope
from jrl.models.families.tables import (
    embedding_entries,
    fused_attention_entries,
    head_entries,
    mlp_entries,
    norm_entries,
)


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `GPTNeoXConfig`.

    Raises:
      ValueError: If the rotary positions are of a kind that is not implemented.
    """
    head_dim = hf.hidden_size // hf.num_attention_heads
    named = hf.to_dict().get("head_dim") or head_dim
    require("gpt_neox", "head_dim", head_dim, named, "the torch model rotates by it and attends without it")
    rope = read_rope("gpt_neox", hf.rope_parameters, head_dim, partial=True)
    return TransformerConfig(
        vocab_size=hf.vocab_size,
        width=hf.hidden_size,
        layers=(LayerConfig(head_dim**-0.5, rope=rope),) * hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_attention_heads,
        head_dim=head_dim,
        mlp_width=hf.intermediate_size,
        max_positions=hf.max_position_embeddings,
        activation=read_activation("gpt_neox", hf.hidden_act),
        gated_mlp=False,
        norm="layer",
        norm_epsilon=hf.layer_norm_eps,
        block="parallel_two_norms" if hf.use_parallel_residual else "pre_norm",
        qkv_bias=hf.attention_bias,
        attention_out_bias=hf.attention_bias,
        mlp_bias=True,
        tie_embeddings=hf.tie_word_embeddings,
        embedding_dropout=hf.hidden_dropout,
        attention_dropout=hf.attention_dropout,
        residual_dropout=hf.hidden_dropout,
        init_range=hf.initializer_range,
    )


def entries(config: TransformerConfig) -> list[Entry]:
    """Every tensor of a GPT-NeoX checkpoint; q, k and v lie together head by head."""
    found = [
        *embedding_entries(config, "gpt_neox.embed_in"),
        *norm_entries(config, "gpt_neox.final_layer_norm", "final_norm"),
        *head_entries(config, "embed_out"),
    ]
    for index in range(config.num_layers):
        name, path = f"gpt_neox.layers.{index}", f"layers_{index}"
        found += [
            *norm_entries(config, f"{name}.input_layernorm", f"{path}/attn_norm"),
            *norm_entries(config, f"{name}.post_attention_layernorm", f"{path}/mlp_norm"),
            *fused_attention_entries(config, f"{name}.attention", f"{path}/attn"),
            *mlp_entries(config, f"{name}.mlp", f"{path}/mlp", up="dense_h_to_4h", down="dense_4h_to_h"),
        ]
    return found


FAMILY = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    read_config=read_config,
    entries=entries,
    base_prefix="gpt_neox.",
    # The head is ignored where it is tied: then it is no entry, but old files hold it all the same.
    ignored=(r"\.attention\.(masked_)?bias$", r"\.rotary_emb\.inv_freq$", r"^embed_out\.weight$"),
)
