# SPDX-License-Identifier: Apache-2.0
"""Config fields and tensor names that the descendants of LLaMA share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from jrl.models.config import LayerConfig, TransformerConfig
from jrl.models.families.base import Entry, read_activation, table
from jrl.models.families.rope import read_rope
from jrl.models.families.tables import (
    attention_entries,
    embedding_entries,
    head_entries,
    linear_entries,
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
        "parallel": (("input_layernorm", "attn_norm"),),
    }
)
"""The norms of a block in the checkpoint, and what jrl calls them."""


@dataclass(frozen=True)
class Names:
    """Names in a checkpoint that differ from LLaMA's.

    Attributes:
      final_norm: Of the norm after the last block.
      norms: Those of a block, and what jrl calls them; None: as in `NORMS`.
      qk_norms: Of the norms of queries and keys.
      out: Of attention's output projection.
      up: Of the MLP's first projection.
      down: Of its last one.
      gate_up: Of gate and up in one tensor, gate first; None: they have one each.
    """

    final_norm: str = "norm"
    norms: tuple[tuple[str, str], ...] | None = None
    qk_norms: tuple[str, str] = ("q_norm", "k_norm")
    out: str = "o_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    gate_up: str | None = None


LLAMA = Names()
Kind = TypeVar("Kind")

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
    windows = read_kinds(model_type, hf, sizes)
    if "sliding_attention" in hf.layer_types and not hf.sliding_window:
        raise ValueError(
            f"{model_type}: `sliding_window` must be a number of tokens, got {hf.sliding_window!r}: "
            "`layer_types` has layers with sliding attention."
        )
    return windows


def read_kinds(model_type: str, hf: Any, kinds: Mapping[str, Kind]) -> tuple[Kind, ...]:
    """Layers, or their windows, one for each name in `layer_types`.

    Args:
      model_type: Of the config.
      hf: A transformers config.
      kinds: What each type stands for: a layer, or its window.
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
    *,
    norm_epsilon: float | None = None,
    attention_dropout: float | None = None,
    mlp_width: int | None = None,
    num_kv_heads: int | None = None,
) -> TransformerConfig:
    """A decoder of the plain kind: RMSNorm before attention and gated MLP, no biases.

    Args:
      model_type: Of the config.
      hf: A transformers config with LLaMA's names.
      layers: One entry a block.
      activation: Transformers' name of it.
      norm_epsilon: Of the norms; None: `rms_norm_eps`.
      attention_dropout: Rate on the attention weights; None: the config's.
      mlp_width: Inner width of the MLP; None: `intermediate_size`.
      num_kv_heads: Key/value heads; None: `num_key_value_heads`.
    Raises:
      ValueError: If the activation is unknown.
    """
    return TransformerConfig(
        vocab_size=hf.vocab_size,
        width=hf.hidden_size,
        layers=layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads if num_kv_heads is None else num_kv_heads,
        head_dim=read_head_dim(hf),
        mlp_width=hf.intermediate_size if mlp_width is None else mlp_width,
        max_positions=hf.max_position_embeddings,
        activation=read_activation(model_type, activation),
        gated_mlp=True,
        norm="rms",
        norm_epsilon=hf.rms_norm_eps if norm_epsilon is None else norm_epsilon,
        qkv_bias=False,
        attention_out_bias=False,
        mlp_bias=False,
        # The text config of a multimodal model need not say it: the whole one does.
        tie_embeddings=hf.to_dict().get("tie_word_embeddings", False),
        attention_dropout=hf.attention_dropout if attention_dropout is None else attention_dropout,
        init_range=hf.initializer_range,
    )


def entries(config: TransformerConfig, names: Names = LLAMA) -> list[Entry]:
    """Every tensor of a checkpoint with LLaMA's names, or those that a family has for some of them."""
    found = outer_entries(config, names)
    for index, layer in enumerate(config.layers):
        name, path = f"model.layers.{index}.mlp", f"layers_{index}/mlp"
        found += attention_block_entries(config, index, names)
        found += gated_mlp_entries(config.for_layer(layer), name, path, names)
    return found


def outer_entries(config: TransformerConfig, names: Names = LLAMA) -> list[Entry]:
    """Embedding, final norm and head."""
    return [
        *embedding_entries(config, "model.embed_tokens"),
        *norm_entries(config, f"model.{names.final_norm}", "final_norm"),
        *head_entries(config),
    ]


def gated_mlp_entries(config: TransformerConfig, name: str, path: str, names: Names = LLAMA) -> list[Entry]:
    """The MLP of one layer; `name` and `path` as of `mlp_entries`."""
    if names.gate_up is None:
        return mlp_entries(config, name, path, up=names.up, down=names.down)
    parts, width, inner = (f"{path}/gate", f"{path}/up"), config.width, config.mlp_width
    return [
        *linear_entries(f"{name}.{names.gate_up}", parts, width, 2 * inner, bias=config.mlp_bias),
        *linear_entries(f"{name}.{names.down}", (f"{path}/down",), inner, width, bias=config.mlp_bias),
    ]


def attention_block_entries(config: TransformerConfig, index: int, names: Names = LLAMA) -> list[Entry]:
    """Entries of a block without its MLP: its norms, and attention with the norms of queries and keys."""
    name, path, layer = f"model.layers.{index}", f"layers_{index}", config.layers[index]
    config = config.for_layer(layer)
    parts = "q" if layer.keys_of is not None else "qk" if layer.keys_as_values else "qkv"
    found = attention_entries(config, f"{name}.self_attn", f"{path}/attn", out=names.out, parts=parts)
    found += block_norm_entries(config, index, names)
    if config.qk_norm is not None:
        counts = {"q": config.num_heads, "k": config.num_kv_heads}
        for hf_norm, part in zip(names.qk_norms, "qk", strict=True):
            if part in parts:
                norm_path = f"{path}/attn/{part}_norm"
                found += qk_norm_entries(config, f"{name}.self_attn.{hf_norm}", norm_path, counts[part])
    return found


def block_norm_entries(config: TransformerConfig, index: int, names: Names = LLAMA) -> list[Entry]:
    """The norms before and after the two halves of a block."""
    found: list[Entry] = []
    for hf_norm, norm in names.norms or NORMS[config.block]:
        found += norm_entries(config, f"model.layers.{index}.{hf_norm}", f"layers_{index}/{norm}")
    return found


def qk_norm_entries(config: TransformerConfig, name: str, path: str, heads: int) -> list[Entry]:
    """The norm over as many heads' queries or keys."""
    if config.qk_norm == "own_head":
        return [Entry(f"{name}.weight", (f"{path}/scale",), table(), (heads, config.head_dim))]
    width = config.head_dim if config.qk_norm == "head" else heads * config.head_dim
    return norm_entries(config, name, path, width)
