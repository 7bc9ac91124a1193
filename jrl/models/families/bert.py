# SPDX-License-Identifier: Apache-2.0
"""BERT (Devlin et al. 2018, arXiv:1810.04805) as a classifier: a tanh layer on the first token, then the labels."""

from __future__ import annotations

from typing import Any

from jrl.models.config import LayerConfig, TransformerConfig
from jrl.models.encoder import EncoderConfig
from jrl.models.families.base import Entry, Family, read_activation, require, table
from jrl.models.families.tables import (
    attention_out_entries,
    embedding_entries,
    linear_entries,
    mlp_entries,
    norm_entries,
    position_entries,
)


def read_config(hf: Any) -> EncoderConfig:
    """Maps a `BertConfig`.

    Raises:
      ValueError: If the config asks for a decoder or for relative positions.
    """
    return EncoderConfig(
        body=read_body(hf),
        num_token_types=hf.type_vocab_size,
        pooler="tanh",
        num_labels=hf.num_labels,
        head_dropout=read_head_dropout(hf),
    )


def read_body(hf: Any) -> TransformerConfig:
    """Embedding and blocks of a `BertConfig`, or of one with the same fields.

    Raises:
      ValueError: If the config asks for a decoder or for relative positions.
    """
    kind = hf.model_type
    require(kind, "is_decoder", False, hf.is_decoder, "a classifier reads the whole text")
    require(kind, "add_cross_attention", False, hf.add_cross_attention, "there is nothing to attend to")
    check_positions(hf)
    return TransformerConfig(
        vocab_size=hf.vocab_size,
        width=hf.hidden_size,
        layers=(LayerConfig((hf.hidden_size // hf.num_attention_heads) ** -0.5),) * hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_attention_heads,
        head_dim=hf.hidden_size // hf.num_attention_heads,
        mlp_width=hf.intermediate_size,
        max_positions=hf.max_position_embeddings,
        activation=read_activation(kind, hf.hidden_act),
        gated_mlp=False,
        norm="layer",
        norm_epsilon=hf.layer_norm_eps,
        block="post_norm",
        learned_positions=True,
        embedding_norm=True,
        final_norm=False,
        qkv_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        tie_embeddings=True,
        init_range=hf.initializer_range,
        embedding_dropout=hf.hidden_dropout_prob,
        attention_dropout=hf.attention_probs_dropout_prob,
        residual_dropout=hf.hidden_dropout_prob,
    )


def read_head_dropout(hf: Any) -> float:
    """`classifier_dropout`, or the layers' rate where a config has none."""
    rate: float = hf.hidden_dropout_prob if hf.classifier_dropout is None else hf.classifier_dropout
    return rate


def check_positions(hf: Any) -> None:
    """Refuses positions that enter the attention; old configs name them, new ones have no such entry.

    Raises:
      ValueError: If `position_embedding_type` is there and not "absolute".
    """
    found = hf.to_dict().get("position_embedding_type", "absolute")
    require(hf.model_type, "position_embedding_type", "absolute", found, "no other kind is implemented")


def entries(config: EncoderConfig) -> list[Entry]:
    """Every tensor of a BERT classifier."""
    width = config.body.width
    return [
        *body_entries(config, "bert"),
        *linear_entries("bert.pooler.dense", ("pooler",), width, width, bias=True),
        *linear_entries("classifier", ("classifier",), width, config.num_labels, bias=True),
    ]


def body_entries(config: EncoderConfig, prefix: str) -> list[Entry]:
    """Embedding and blocks under the names of BERT."""
    body = config.body
    name, types = f"{prefix}.embeddings", (config.num_token_types, body.width)
    found = [
        *embedding_entries(body, f"{name}.word_embeddings"),
        *position_entries(body, f"{name}.position_embeddings"),
        Entry(f"{name}.token_type_embeddings.weight", ("token_type/embedding",), table(), types),
        *norm_entries(body, f"{name}.LayerNorm", "embed_norm"),
    ]
    for index in range(body.num_layers):
        name, path = f"{prefix}.encoder.layer.{index}", f"layers_{index}"
        for hf_part, part in (("query", "q"), ("key", "k"), ("value", "v")):
            module, parts = f"{name}.attention.self.{hf_part}", (f"{path}/attn/{part}",)
            found += linear_entries(module, parts, body.width, body.width, bias=True)
        found += attention_out_entries(body, f"{name}.attention.output.dense", f"{path}/attn")
        found += mlp_entries(body, name, f"{path}/mlp", up="intermediate.dense", down="output.dense")
        found += norm_entries(body, f"{name}.attention.output.LayerNorm", f"{path}/attn_norm")
        found += norm_entries(body, f"{name}.output.LayerNorm", f"{path}/mlp_norm")
    return found


FAMILY = Family(
    model_type="bert",
    architecture="BertForSequenceClassification",
    read_config=read_config,
    entries=entries,
    base_prefix="bert.",
    ignored=(r"\.position_ids$",),
    kind="encoder",
)
