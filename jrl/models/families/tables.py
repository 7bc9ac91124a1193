# SPDX-License-Identifier: Apache-2.0
"""Pieces of a family's table of tensors that many families share. Names and sizes only: no arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jrl.models.config import TransformerConfig
from jrl.models.families.base import (
    Entry,
    Transform,
    linear,
    linear_by_head,
    table,
    vector,
    vector_by_head,
    vocabulary,
    vocabulary_vector,
)
from jrl.models.layers import WITH_BIAS


def embedding_entries(config: TransformerConfig, name: str) -> list[Entry]:
    """Entry of the embedding."""
    shape = (config.vocab_size, config.feature_width)
    return [Entry(f"{name}.weight", ("embed/embedding",), vocabulary(transposed=False), shape)]


def position_entries(config: TransformerConfig, name: str) -> list[Entry]:
    """The table of learned positions."""
    shape = (config.max_positions + config.position_offset, config.width)
    return [Entry(f"{name}.weight", ("position/embedding",), table(), shape)]


def head_entries(config: TransformerConfig, name: str = "lm_head") -> list[Entry]:
    """The head; nothing where it is tied to the embedding."""
    if config.tie_embeddings:
        return []
    shape = (config.vocab_size, config.feature_width)
    found = [Entry(f"{name}.weight", ("lm_head/kernel",), vocabulary(transposed=True), shape)]
    if config.head_bias:
        found.append(Entry(f"{name}.bias", ("lm_head/bias",), vocabulary_vector(), shape[:1]))
    return found


def norm_entries(
    config: TransformerConfig, name: str, path: str, width: int | None = None, kind: str | None = None
) -> list[Entry]:
    """Entries of a norm: a scale, and a bias where the norms of this config have one.

    Args:
      config: Of the decoder.
      name: Of the module in the checkpoint, "model.norm".
      path: Of its parameters, "final_norm".
      width: Size of its scale; None: D.
      kind: Of the norm; None: that of the config.
    """
    shape = (width or config.width,)
    found = [Entry(f"{name}.weight", (f"{path}/scale",), vector(), shape)]
    if (kind or config.norm) in WITH_BIAS:
        found.append(Entry(f"{name}.bias", (f"{path}/bias",), vector(), shape))
    return found


def linear_entries(
    name: str,
    paths: Sequence[str],
    size_in: int,
    size_out: int,
    *,
    bias: bool,
    weight: Transform | None = None,
    bias_vector: Transform | None = None,
) -> list[Entry]:
    """Entries of a linear map of the checkpoint, with its bias if it has one.

    Args:
      name: Of the module in the checkpoint, "model.layers.0.mlp.up_proj".
      paths: Of the projections it holds, ("layers_0/mlp/up",).
      size_in: Inputs, all axes together.
      size_out: Outputs, of all projections together.
      bias: Whether it has one.
      weight: Layout of the weight; None: `linear()`.
      bias_vector: Layout of the bias; None: `vector()`.
    """
    weight = weight or linear()
    shape = (size_in, size_out) if weight.inputs_first else (size_out, size_in)
    found = [Entry(f"{name}.weight", tuple(f"{path}/kernel" for path in paths), weight, shape)]
    if bias:
        biases = tuple(f"{path}/bias" for path in paths)
        found.append(Entry(f"{name}.bias", biases, bias_vector or vector(), (size_out,)))
    return found


def attention_entries(
    config: TransformerConfig,
    name: str,
    path: str,
    out: str = "o_proj",
    qkv: str = "{}_proj",
    parts: str = "qkv",
) -> list[Entry]:
    """Attention with q, k, v and o in tensors of their own.

    Args:
      config: Of the decoder.
      name: Of the module in the checkpoint, "model.layers.0.self_attn".
      path: Of its parameters, "layers_0/attn".
      out: Name of o there.
      qkv: Names of the others there, with {} for the letter.
      parts: Letters of those that there are.
    """
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    found = []
    for part in parts:
        size = heads if part == "q" else kv_heads
        module = f"{name}.{qkv.format(part)}"
        found += linear_entries(module, (f"{path}/{part}",), config.width, size, bias=config.qkv_bias)
    return found + attention_out_entries(config, f"{name}.{out}", path)


def fused_attention_entries(config: TransformerConfig, name: str, path: str) -> list[Entry]:
    """Attention with q, k and v in one tensor, `query_key_value`, by key/value head; `name` and `path` as above."""
    heads = config.num_heads + 2 * config.num_kv_heads
    fused = linear_entries(
        f"{name}.query_key_value",
        tuple(f"{path}/{part}" for part in "qkv"),
        config.width,
        heads * config.head_dim,
        bias=config.qkv_bias,
        weight=linear_by_head(),
        bias_vector=vector_by_head(),
    )
    return fused + attention_out_entries(config, f"{name}.dense", path)


def attention_out_entries(
    config: TransformerConfig, name: str, path: str, weight: Callable[[int], Transform] = linear
) -> list[Entry]:
    """The projection o of an attention whose parameters are at `path`; `weight` is `linear` or `conv1d`."""
    heads, bias = config.num_heads * config.head_dim, config.attention_out_bias
    return linear_entries(name, (f"{path}/o",), heads, config.width, bias=bias, weight=weight(2))


def mlp_entries(
    config: TransformerConfig,
    name: str,
    path: str,
    *,
    up: str = "up_proj",
    gate: str = "gate_proj",
    down: str = "down_proj",
    weight: Callable[[int], Transform] = linear,
) -> list[Entry]:
    """An MLP with up, gate (where the config has one) and down in tensors of their own.

    Args:
      config: Of the decoder.
      name: Of the module in the checkpoint, "model.layers.0.mlp".
      path: Of its parameters, "layers_0/mlp".
      up: Name of up there.
      gate: Name of gate there.
      down: Name of down there.
      weight: `linear` or `conv1d`.
    """
    width, inner, bias = config.width, config.mlp_width, config.mlp_bias
    found = linear_entries(f"{name}.{up}", (f"{path}/up",), width, inner, bias=bias, weight=weight(1))
    if config.gated_mlp:
        found += linear_entries(
            f"{name}.{gate}", (f"{path}/gate",), width, inner, bias=bias, weight=weight(1)
        )
    return found + linear_entries(
        f"{name}.{down}", (f"{path}/down",), inner, width, bias=bias, weight=weight(1)
    )
