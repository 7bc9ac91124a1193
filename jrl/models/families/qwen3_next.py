# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next (Qwen team 2025): three layers of the gated delta rule to one of gated attention, and experts.

Norms multiply by 1 + scale, but for the one behind the recurrence. A quarter of a head rotates. Tensors of the
multi-token prediction (`mtp`), which serves speculative decoding alone, are left out, as transformers does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jrl.models.config import GatedDelta, LayerConfig, TransformerConfig
from jrl.models.families import llama_like
from jrl.models.families.base import (
    Entry,
    Family,
    channels,
    linear,
    linear_by_group,
    linear_by_head,
    require,
    vector,
    vector_by_head,
)
from jrl.models.families.qwen2_moe import feed_forward_entries, with_shared_expert
from jrl.models.families.qwen3_moe import has_experts, read_qwen_experts
from jrl.models.families.rope import read_rope
from jrl.models.families.tables import attention_out_entries, linear_entries, norm_entries

IGNORED = (*llama_like.IGNORED, r"^mtp\.")


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `Qwen3NextConfig`.

    Raises:
      ValueError: If heads or experts do not fit together, or the activation, a type of layer or the scaling of the
        rotary positions is not implemented.
    """
    experts = with_shared_expert(hf, read_qwen_experts("qwen3_next", hf))
    layers = tuple(
        replace(layer, experts=experts) if has_experts(hf, index) else layer
        for index, layer in enumerate(read_layers("qwen3_next", hf))
    )
    return read_hybrid("qwen3_next", hf, layers, hf.intermediate_size)


def read_layers(model_type: str, hf: Any) -> tuple[LayerConfig, ...]:
    """Attention or the gated delta rule, by `layer_types`.

    Raises:
      ValueError: If there is not one type a layer, one is unknown, or the heads do not divide.
    """
    head_dim = llama_like.read_head_dim(hf)
    if hf.linear_num_value_heads % hf.linear_num_key_heads:
        raise ValueError(
            f"{model_type}: `linear_num_key_heads` must divide linear_num_value_heads = {hf.linear_num_value_heads}, "
            f"got {hf.linear_num_key_heads}."
        )
    mixer = GatedDelta(
        hf.linear_num_key_heads,
        hf.linear_num_value_heads,
        hf.linear_key_head_dim,
        hf.linear_value_head_dim,
        hf.linear_conv_kernel_dim,
    )
    attention = LayerConfig(
        head_dim**-0.5, rope=read_rope(model_type, hf.rope_parameters, head_dim, partial=True)
    )
    kinds = {"full_attention": attention, "linear_attention": LayerConfig(head_dim**-0.5, mixer=mixer)}
    return llama_like.read_kinds(model_type, hf, kinds)


def read_hybrid(
    model_type: str, hf: Any, layers: tuple[LayerConfig, ...], mlp_width: int
) -> TransformerConfig:
    """A decoder with these layers.

    Raises:
      ValueError: If the activation is unknown.
    """
    require(model_type, "hidden_act", "silu", hf.hidden_act, "the gates of the recurrence are SiLU")
    common = llama_like.read_config(model_type, hf, layers, hf.hidden_act, mlp_width=mlp_width)
    return replace(
        common,
        norm="rms_plus_one",
        qkv_bias=hf.attention_bias,
        attention_out_bias=hf.attention_bias,
        attention_gate=True,
        qk_norm="head",
    )


def entries(config: TransformerConfig) -> list[Entry]:
    """Every tensor of a Qwen3-Next checkpoint."""
    found = llama_like.outer_entries(config)
    for index, layer in enumerate(config.layers):
        name, path = f"model.layers.{index}", f"layers_{index}"
        found += llama_like.block_norm_entries(config, index)
        if isinstance(layer.mixer, GatedDelta):
            found += _fused_entries(config, layer.mixer, f"{name}.linear_attn", f"{path}/attn")
        else:
            found += gated_attention_entries(config, f"{name}.self_attn", f"{path}/attn")
        found += feed_forward_entries(config, layer, f"{name}.mlp", path)
    return found


def gated_attention_entries(config: TransformerConfig, name: str, path: str) -> list[Entry]:
    """Attention whose queries lie head by head beside their gates."""
    width, bias = config.width, config.qkv_bias
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    found = linear_entries(
        f"{name}.q_proj",
        (f"{path}/q", f"{path}/gate"),
        width,
        2 * heads,
        bias=bias,
        weight=linear_by_head(),
        bias_vector=vector_by_head(),
    )
    for part in "kv":
        found += linear_entries(f"{name}.{part}_proj", (f"{path}/{part}",), width, kv_heads, bias=bias)
    found += attention_out_entries(config, f"{name}.o_proj", path)
    for part in "qk":
        found += norm_entries(config, f"{name}.{part}_norm", f"{path}/{part}_norm", config.head_dim)
    return found


def small_delta_entries(config: TransformerConfig, sizes: GatedDelta, name: str, path: str) -> list[Entry]:
    """Entries of a layer of the gated delta rule, all but its projections in."""
    inner, heads = sizes.value_heads * sizes.value_dim, (sizes.value_heads,)
    channel_count = 2 * sizes.key_heads * sizes.key_dim + inner
    taps = tuple(f"{path}/{part}_taps" for part in "qkv")
    return [
        Entry(f"{name}.conv1d.weight", taps, channels(), (channel_count, 1, sizes.taps)),
        Entry(f"{name}.A_log", (f"{path}/log_rates",), vector(), heads),
        Entry(f"{name}.dt_bias", (f"{path}/decay_bias",), vector(), heads),
        *norm_entries(config, f"{name}.norm", f"{path}/norm", sizes.value_dim),
        *linear_entries(
            f"{name}.out_proj", (f"{path}/o",), inner, config.width, bias=False, weight=linear(2)
        ),
    ]


def _fused_entries(config: TransformerConfig, sizes: GatedDelta, name: str, path: str) -> list[Entry]:
    """Projections in two tensors, each group by group: a head of keys and the heads of values that it serves."""
    values = sizes.value_heads * sizes.value_dim
    wide, weight = 2 * sizes.key_heads * sizes.key_dim + 2 * values, linear_by_group(sizes.key_heads)
    big = tuple(f"{path}/{part}" for part in ("q", "k", "v", "gate"))
    small = (f"{path}/rate", f"{path}/decay")
    return [
        *linear_entries(f"{name}.in_proj_qkvz", big, config.width, wide, bias=False, weight=weight),
        *linear_entries(
            f"{name}.in_proj_ba", small, config.width, 2 * sizes.value_heads, bias=False, weight=weight
        ),
        *small_delta_entries(config, sizes, name, path),
    ]


FAMILY = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    read_config=read_config,
    entries=entries,
    base_prefix="model.",
    ignored=IGNORED,
)
