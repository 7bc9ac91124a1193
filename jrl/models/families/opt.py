# SPDX-License-Identifier: Apache-2.0
"""OPT (Zhang et al. 2022, arXiv:2205.01068): learned positions from row 2 on; in the 350m norms come last."""

from __future__ import annotations

from typing import Any

from jrl.models.config import LayerConfig, TransformerConfig
from jrl.models.families.base import Entry, Family, read_activation, require
from jrl.models.families.tables import (
    attention_entries,
    embedding_entries,
    head_entries,
    linear_entries,
    mlp_entries,
    norm_entries,
    position_entries,
)


def read_config(hf: Any) -> TransformerConfig:
    """Maps an `OPTConfig`.

    Raises:
      ValueError: If the norms have no parameters.
    """
    learned = "norms without parameters are not implemented"
    require("opt", "layer_norm_elementwise_affine", True, hf.layer_norm_elementwise_affine, learned)
    head_dim = hf.hidden_size // hf.num_attention_heads
    return TransformerConfig(
        vocab_size=hf.vocab_size,
        width=hf.hidden_size,
        layers=(LayerConfig(head_dim**-0.5),) * hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_attention_heads,
        head_dim=head_dim,
        mlp_width=hf.ffn_dim,
        max_positions=hf.max_position_embeddings,
        activation=read_activation("opt", hf.activation_function),
        gated_mlp=False,
        norm="layer",
        norm_epsilon=1e-5,
        block="pre_norm" if hf.do_layer_norm_before else "post_norm",
        qkv_bias=hf.enable_bias,
        attention_out_bias=hf.enable_bias,
        mlp_bias=hf.enable_bias,
        tie_embeddings=hf.tie_word_embeddings,
        learned_positions=True,
        position_offset=2,
        embedding_width=hf.word_embed_proj_dim if hf.word_embed_proj_dim != hf.hidden_size else None,
        # The underscore is the config's own: models tuned before transformers 4.20.1 lack the final norm.
        final_norm=hf.do_layer_norm_before and not hf._remove_final_layer_norm,
        attention_dropout=hf.attention_dropout,
        residual_dropout=hf.dropout,
        init_range=hf.init_std,
    )


def entries(config: TransformerConfig) -> list[Entry]:
    """Every tensor of an OPT checkpoint."""
    found = [
        *embedding_entries(config, "model.decoder.embed_tokens"),
        *position_entries(config, "model.decoder.embed_positions"),
        *head_entries(config),
    ]
    if config.final_norm:
        found += norm_entries(config, "model.decoder.final_layer_norm", "final_norm")
    if config.embedding_width is not None:
        outer, width = config.embedding_width, config.width
        found += linear_entries("model.decoder.project_in", ("embed_in",), outer, width, bias=False)
        found += linear_entries("model.decoder.project_out", ("embed_out",), width, outer, bias=False)
    for index in range(config.num_layers):
        name, path = f"model.decoder.layers.{index}", f"layers_{index}"
        found += [
            *norm_entries(config, f"{name}.self_attn_layer_norm", f"{path}/attn_norm"),
            *norm_entries(config, f"{name}.final_layer_norm", f"{path}/mlp_norm"),
            *attention_entries(config, f"{name}.self_attn", f"{path}/attn", out="out_proj"),
            *mlp_entries(config, name, f"{path}/mlp", up="fc1", down="fc2"),
        ]
    return found


FAMILY = Family(
    model_type="opt",
    architecture="OPTForCausalLM",
    read_config=read_config,
    entries=entries,
    base_prefix="model.",
)
