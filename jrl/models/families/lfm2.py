# SPDX-License-Identifier: Apache-2.0
"""LFM2 (Liquid AI 2025, arXiv:2511.23404): gated convolutions over three tokens, with some layers of attention."""

from __future__ import annotations

from typing import Any

from jrl.models.config import LayerConfig, ShortConvolution, TransformerConfig
from jrl.models.families import llama_like
from jrl.models.families.base import Entry, Family, channels, require
from jrl.models.families.rope import read_rope
from jrl.models.families.tables import (
    attention_entries,
    embedding_entries,
    head_entries,
    linear_entries,
    mlp_entries,
    norm_entries,
)


def read_config(hf: Any) -> TransformerConfig:
    """Maps an `Lfm2Config`.

    Raises:
      ValueError: If convolutions have biases, or a type of layer or the scaling of the rotary positions is not
        implemented.
    """
    # No published model has them, and with them torch lets padding into a row's convolutions.
    require("lfm2", "conv_bias", False, hf.conv_bias, "convolutions with biases are not implemented")
    head_dim = llama_like.read_head_dim(hf)
    kinds = {
        "full_attention": LayerConfig(head_dim**-0.5, rope=read_rope("lfm2", hf.rope_parameters, head_dim)),
        "conv": LayerConfig(head_dim**-0.5, mixer=ShortConvolution(hf.conv_L_cache)),
    }
    return TransformerConfig(
        vocab_size=hf.vocab_size,
        width=hf.hidden_size,
        layers=llama_like.read_kinds("lfm2", hf, kinds),
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=head_dim,
        mlp_width=_mlp_width(hf),
        max_positions=hf.max_position_embeddings,
        activation="silu",
        gated_mlp=True,
        norm="rms",
        norm_epsilon=hf.norm_eps,
        qkv_bias=False,
        attention_out_bias=False,
        mlp_bias=False,
        tie_embeddings=hf.tie_word_embeddings,
        qk_norm="head",
        init_range=hf.initializer_range,
    )


def _mlp_width(hf: Any) -> int:
    """The config's width is that of an MLP without gates: two thirds of it, times a factor, rounded up."""
    width: int = hf.intermediate_size
    factor, multiple = hf.block_ffn_dim_multiplier, hf.block_multiple_of
    if not hf.block_auto_adjust_ff_dim:
        return width
    width = int(2 * width / 3)
    return width if factor is None else multiple * -(-int(factor * width) // multiple)


def entries(config: TransformerConfig) -> list[Entry]:
    """Every tensor of an LFM2 checkpoint."""
    found = [
        *embedding_entries(config, "model.embed_tokens"),
        *norm_entries(config, "model.embedding_norm", "final_norm"),
        *head_entries(config),
    ]
    for index, layer in enumerate(config.layers):
        name, path = f"model.layers.{index}", f"layers_{index}"
        found += norm_entries(config, f"{name}.operator_norm", f"{path}/attn_norm")
        found += norm_entries(config, f"{name}.ffn_norm", f"{path}/mlp_norm")
        if isinstance(layer.mixer, ShortConvolution):
            found += _convolution_entries(config, layer.mixer, f"{name}.conv", f"{path}/attn")
        else:
            found += attention_entries(config, f"{name}.self_attn", f"{path}/attn", out="out_proj")
            for part in "qk":
                norm, size = f"{path}/attn/{part}_norm", config.head_dim
                found += norm_entries(config, f"{name}.self_attn.{part}_layernorm", norm, size)
        found += mlp_entries(config, f"{name}.feed_forward", f"{path}/mlp", up="w3", gate="w1", down="w2")
    return found


def _convolution_entries(
    config: TransformerConfig, sizes: ShortConvolution, name: str, path: str
) -> list[Entry]:
    width = config.width
    parts = tuple(f"{path}/{part}" for part in ("before", "after", "x"))
    return [
        Entry(f"{name}.conv.weight", (f"{path}/taps",), channels(), (width, 1, sizes.taps)),
        *linear_entries(f"{name}.in_proj", parts, width, 3 * width, bias=False),
        *linear_entries(f"{name}.out_proj", (f"{path}/out",), width, width, bias=False),
    ]


FAMILY = Family(
    model_type="lfm2",
    architecture="Lfm2ForCausalLM",
    read_config=read_config,
    entries=entries,
    base_prefix="model.",
    ignored=llama_like.IGNORED,
)
