# SPDX-License-Identifier: Apache-2.0
"""Config fields and tensor names that the descendants of LLaMA share."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jrl.models.config import LayerConfig, TransformerConfig
from jrl.models.families.base import Entry, read_activation
from jrl.models.families.rope import read_rope
from jrl.models.families.tables import (
    attention_entries,
    embedding_entries,
    head_entries,
    mlp_entries,
    norm_entries,
)

NORMS = MappingProxyType(
    {
        "pre_norm": (("input_layernorm", "attn_norm"), ("post_attention_layernorm", "mlp_norm")),
        "sandwich": (
            ("input_layernorm", "attn_norm"),
            ("post_attention_layernorm", "attn_out_norm"),
            ("pre_feedforward_layernorm", "mlp_norm"),
            ("post_feedforward_layernorm", "mlp_out_norm"),
        ),
        "output_norm": (
            ("post_attention_layernorm", "attn_out_norm"),
            ("post_feedforward_layernorm", "mlp_out_norm"),
        ),
    }
)
"""The norms of a block in the checkpoint, and what jrl calls them."""

IGNORED = (r"\.rotary_emb\.inv_freq$",)
"""Old checkpoints hold the inverse frequencies of the rotary positions."""


def read_head_dim(hf: Any) -> int:
    """H: the config's `head_dim`, which some classes do not declare, or else an even share of the width."""
    return hf.to_dict().get("head_dim") or hf.hidden_size // hf.num_attention_heads


def read_layers(model_type: str, hf: Any) -> tuple[LayerConfig, ...]:
    """Layers with the usual scale, one kind of rotary positions, and windows as `read_windows` finds them."""
    head_dim = read_head_dim(hf)
    rope = read_rope(model_type, hf.rope_parameters, head_dim)
    return tuple(LayerConfig(head_dim**-0.5, window, rope) for window in read_windows(model_type, hf))


def read_windows(model_type: str, hf: Any) -> tuple[int | None, ...]:
    """The window of every layer, from `layer_types` and `sliding_window`.

    Raises:
      ValueError: If there is not one type a layer, or one is unknown, or the size of the window is missing.
    """
    sizes = {"full_attention": None, "sliding_attention": hf.sliding_window}
    if len(hf.layer_types) != hf.num_hidden_layers:
        raise ValueError(
            f"{model_type}: `layer_types` must have num_hidden_layers = {hf.num_hidden_layers} entries, "
            f"got {len(hf.layer_types)}."
        )
    for kind in hf.layer_types:
        if kind not in sizes:
            raise ValueError(f"{model_type}: `layer_types` must be among {', '.join(sizes)}; got {kind!r}.")
    if "sliding_attention" in hf.layer_types and not hf.sliding_window:
        raise ValueError(
            f"{model_type}: `sliding_window` must be a number of tokens, got {hf.sliding_window!r}: "
            "`layer_types` has layers with sliding attention."
        )
    return tuple(sizes[kind] for kind in hf.layer_types)


def read_kinds(model_type: str, hf: Any, kinds: Mapping[str, LayerConfig]) -> tuple[LayerConfig, ...]:
    """The layers that `layer_types` names.

    Args:
      model_type: Of the config.
      hf: A transformers config.
      kinds: A layer of each type.
    Raises:
      ValueError: If there is not one type a layer, or one is unknown.
    """
    if len(hf.layer_types) != hf.num_hidden_layers:
        raise ValueError(
            f"{model_type}: `layer_types` must have num_hidden_layers = {hf.num_hidden_layers} entries, "
            f"got {len(hf.layer_types)}."
        )
    for kind in hf.layer_types:
        if kind not in kinds:
            raise ValueError(f"{model_type}: `layer_types` must be among {', '.join(kinds)}; got {kind!r}.")
    return tuple(kinds[kind] for kind in hf.layer_types)


def read_config(
    model_type: str,
    hf: Any,
    layers: tuple[LayerConfig, ...],
    activation: str,
    mlp_width: int | None = None,
) -> TransformerConfig:
    """A decoder of the plain kind: RMSNorm before attention and gated MLP, no biases.

    Args:
      model_type: Of the config.
      hf: A transformers config with LLaMA's names.
      layers: One entry a block.
      activation: Transformers' name of it.
      mlp_width: Inner width of the MLP; None: `intermediate_size`.
    Raises:
      ValueError: If the activation is unknown.
    """
    return TransformerConfig(
        vocab_size=hf.vocab_size,
        width=hf.hidden_size,
        layers=layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=read_head_dim(hf),
        mlp_width=hf.intermediate_size if mlp_width is None else mlp_width,
        max_positions=hf.max_position_embeddings,
        activation=read_activation(model_type, activation),
        gated_mlp=True,
        norm="rms",
        norm_epsilon=hf.rms_norm_eps,
        qkv_bias=False,
        attention_out_bias=False,
        mlp_bias=False,
        tie_embeddings=hf.tie_word_embeddings,
        attention_dropout=hf.attention_dropout,
        init_range=hf.initializer_range,
    )


def entries(config: TransformerConfig) -> list[Entry]:
    """Every tensor of a checkpoint with LLaMA's names."""
    found = outer_entries(config)
    for index in range(config.num_layers):
        found += attention_block_entries(config, index)
        found += mlp_entries(config, f"model.layers.{index}.mlp", f"layers_{index}/mlp")
    return found


def outer_entries(config: TransformerConfig) -> list[Entry]:
    """Embedding, final norm and head."""
    return [
        *embedding_entries(config, "model.embed_tokens"),
        *norm_entries(config, "model.norm", "final_norm"),
        *head_entries(config),
    ]


def attention_block_entries(config: TransformerConfig, index: int) -> list[Entry]:
    """Entries of a block without its MLP: its norms, and attention with the norms of queries and keys."""
    name, path = f"model.layers.{index}", f"layers_{index}"
    found = attention_entries(config, f"{name}.self_attn", f"{path}/attn")
    for hf_norm, norm in NORMS[config.block]:
        found += norm_entries(config, f"{name}.{hf_norm}", f"{path}/{norm}")
    if config.qk_norm is not None:
        for part, heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
            width = config.head_dim if config.qk_norm == "head" else heads * config.head_dim
            found += norm_entries(config, f"{name}.self_attn.{part}_norm", f"{path}/attn/{part}_norm", width)
    return found
