# SPDX-License-Identifier: Apache-2.0
"""GPT-Neo (Black et al. 2021): GPT-2 with windows on every other layer and attention scores that are not scaled."""

from __future__ import annotations

from typing import Any

from jrl.models.config import LayerConfig, TransformerConfig
from jrl.models.families.base import Entry, Family, read_activation
from jrl.models.families.tables import (
    attention_entries,
    embedding_entries,
    head_entries,
    mlp_entries,
    norm_entries,
    position_entries,
)


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `GPTNeoConfig`.

    Raises:
      ValueError: If a layer is neither global nor local.
    """
    if len(hf.attention_layers) != hf.num_layers:
        raise ValueError(
            f"gpt_neo: `attention_types` must describe num_layers = {hf.num_layers} layers, got "
            f"{len(hf.attention_layers)}."
        )
    for kind in hf.attention_layers:
        if kind not in ("global", "local"):
            raise ValueError(f"gpt_neo: `attention_types` may name global and local layers, got {kind!r}.")
    return TransformerConfig(
        vocab_size=hf.vocab_size,
        width=hf.hidden_size,
        layers=tuple(
            LayerConfig(1.0, window=hf.window_size if kind == "local" else None)
            for kind in hf.attention_layers
        ),
        num_heads=hf.num_heads,
        num_kv_heads=hf.num_heads,
        head_dim=hf.hidden_size // hf.num_heads,
        mlp_width=hf.intermediate_size if hf.intermediate_size is not None else 4 * hf.hidden_size,
        max_positions=hf.max_position_embeddings,
        activation=read_activation("gpt_neo", hf.activation_function),
        gated_mlp=False,
        norm="layer",
        norm_epsilon=hf.layer_norm_epsilon,
        learned_positions=True,
        qkv_bias=False,
        attention_out_bias=True,
        mlp_bias=True,
        tie_embeddings=hf.tie_word_embeddings,
        embedding_dropout=hf.embed_dropout,
        attention_dropout=hf.attention_dropout,
        residual_dropout=hf.resid_dropout,
        init_range=hf.initializer_range,
    )


def entries(config: TransformerConfig) -> list[Entry]:
    """Every tensor of a GPT-Neo checkpoint."""
    found = [
        *embedding_entries(config, "transformer.wte"),
        *position_entries(config, "transformer.wpe"),
        *norm_entries(config, "transformer.ln_f", "final_norm"),
        *head_entries(config),
    ]
    for index in range(config.num_layers):
        name, path = f"transformer.h.{index}", f"layers_{index}"
        found += [
            *norm_entries(config, f"{name}.ln_1", f"{path}/attn_norm"),
            *norm_entries(config, f"{name}.ln_2", f"{path}/mlp_norm"),
            *attention_entries(config, f"{name}.attn.attention", f"{path}/attn", out="out_proj"),
            *mlp_entries(config, f"{name}.mlp", f"{path}/mlp", up="c_fc", down="c_proj"),
        ]
    return found


FAMILY = Family(
    model_type="gpt_neo",
    architecture="GPTNeoForCausalLM",
    read_config=read_config,
    entries=entries,
    base_prefix="transformer.",
    ignored=(r"\.attn\.attention\.bias$", r"\.attn\.attention\.masked_bias$"),
)
