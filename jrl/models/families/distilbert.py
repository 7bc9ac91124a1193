# SPDX-License-Identifier: Apache-2.0
"""DistilBERT (Sanh et al. 2019, arXiv:1910.01108) as a classifier: BERT without token types, a ReLU in the head."""

from __future__ import annotations

from typing import Any

from jrl.models.config import LayerConfig, TransformerConfig
from jrl.models.encoder import EncoderConfig
from jrl.models.families.base import Entry, Family, read_activation
from jrl.models.families.bert import check_positions
from jrl.models.families.tables import (
    attention_entries,
    embedding_entries,
    linear_entries,
    mlp_entries,
    norm_entries,
    position_entries,
)

NORM_EPSILON = 1e-12  # no entry of the config


def read_config(hf: Any) -> EncoderConfig:
    """Maps a `DistilBertConfig`; sinusoidal positions are a table in the checkpoint like learned ones.

    Raises:
      ValueError: If the config asks for relative positions.
    """
    check_positions(hf)
    body = TransformerConfig(
        vocab_size=hf.vocab_size,
        width=hf.dim,
        layers=(LayerConfig((hf.dim // hf.n_heads) ** -0.5),) * hf.n_layers,
        num_heads=hf.n_heads,
        num_kv_heads=hf.n_heads,
        head_dim=hf.dim // hf.n_heads,
        mlp_width=hf.hidden_dim,
        max_positions=hf.max_position_embeddings,
        activation=read_activation("distilbert", hf.activation),
        gated_mlp=False,
        norm="layer",
        norm_epsilon=NORM_EPSILON,
        block="post_norm",
        learned_positions=True,
        embedding_norm=True,
        final_norm=False,
        qkv_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        tie_embeddings=True,
        init_range=hf.initializer_range,
        embedding_dropout=hf.dropout,
        attention_dropout=hf.attention_dropout,
        residual_dropout=hf.dropout,
    )
    return EncoderConfig(
        body=body,
        num_token_types=0,
        pooler="relu",
        num_labels=hf.num_labels,
        head_dropout=hf.seq_classif_dropout,
    )


def entries(config: EncoderConfig) -> list[Entry]:
    """Every tensor of a DistilBERT classifier."""
    body, width = config.body, config.body.width
    found = [
        *embedding_entries(body, "distilbert.embeddings.word_embeddings"),
        *position_entries(body, "distilbert.embeddings.position_embeddings"),
        *norm_entries(body, "distilbert.embeddings.LayerNorm", "embed_norm"),
    ]
    for index in range(body.num_layers):
        name, path = f"distilbert.transformer.layer.{index}", f"layers_{index}"
        found += attention_entries(body, f"{name}.attention", f"{path}/attn", out="out_lin", qkv="{}_lin")
        found += mlp_entries(body, f"{name}.ffn", f"{path}/mlp", up="lin1", down="lin2")
        found += norm_entries(body, f"{name}.sa_layer_norm", f"{path}/attn_norm")
        found += norm_entries(body, f"{name}.output_layer_norm", f"{path}/mlp_norm")
    return [
        *found,
        *linear_entries("pre_classifier", ("pooler",), width, width, bias=True),
        *linear_entries("classifier", ("classifier",), width, config.num_labels, bias=True),
    ]


FAMILY = Family(
    model_type="distilbert",
    architecture="DistilBertForSequenceClassification",
    read_config=read_config,
    entries=entries,
    base_prefix="distilbert.",
    ignored=(r"\.position_ids$",),
    kind="encoder",
)
