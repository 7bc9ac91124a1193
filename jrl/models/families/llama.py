# SPDX-License-Identifier: Apache-2.0
"""LLaMA 1 to 3 (Touvron et al. 2023, arXiv:2302.13971): rotary positions, RMSNorm, gated MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jrl.models.config import LayerConfig, LinearRopeScaling, Llama3RopeScaling, Rope, TransformerConfig
from jrl.models.families.base import Entry, Family, linear, read_activation, vector, vocabulary


def read_rope(model_type: str, parameters: Mapping[str, Any]) -> Rope:
    """Maps transformers' `rope_parameters`.

    Raises:
      ValueError: If the scaling is of a kind that is not implemented.
    """
    theta = parameters["rope_theta"]
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, LinearRopeScaling(parameters["factor"]))
    if kind == "llama3":
        return Rope(
            theta,
            Llama3RopeScaling(
                parameters["factor"],
                parameters["low_freq_factor"],
                parameters["high_freq_factor"],
                parameters["original_max_position_embeddings"],
            ),
        )
    raise ValueError(f"{model_type}: `rope_type` must be default, linear or llama3; got {kind!r}.")


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `LlamaConfig`."""
    return TransformerConfig(
        vocab_size=hf.vocab_size,
        width=hf.hidden_size,
        layers=(LayerConfig(hf.head_dim**-0.5, rope=read_rope("llama", hf.rope_parameters)),)
        * hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=hf.head_dim,
        mlp_width=hf.intermediate_size,
        max_positions=hf.max_position_embeddings,
        activation=read_activation("llama", hf.hidden_act),
        gated_mlp=True,
        norm="rms",
        norm_epsilon=hf.rms_norm_eps,
        qkv_bias=hf.attention_bias,
        attention_out_bias=hf.attention_bias,
        mlp_bias=hf.mlp_bias,
        tie_embeddings=hf.tie_word_embeddings,
        attention_dropout=hf.attention_dropout,
        init_range=hf.initializer_range,
    )


def entries(config: TransformerConfig) -> list[Entry]:
    """Every tensor of a LLaMA checkpoint."""
    width, inner, vocab = config.width, config.mlp_width, config.vocab_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    found = [
        Entry(
            "model.embed_tokens.weight", ("embed/embedding",), vocabulary(transposed=False), (vocab, width)
        ),
        Entry("model.norm.weight", ("final_norm/scale",), vector(), (width,)),
    ]
    if not config.tie_embeddings:
        found.append(
            Entry("lm_head.weight", ("lm_head/kernel",), vocabulary(transposed=True), (vocab, width))
        )
    for index in range(config.num_layers):
        name, path = f"model.layers.{index}", f"layers_{index}"
        for hf_norm, norm in (("input_layernorm", "attn_norm"), ("post_attention_layernorm", "mlp_norm")):
            found.append(Entry(f"{name}.{hf_norm}.weight", (f"{path}/{norm}/scale",), vector(), (width,)))
        for hf_part, part, input_axes, (size_out, size_in), has_bias in (
            ("self_attn.q_proj", "attn/q", 1, (heads, width), config.qkv_bias),
            ("self_attn.k_proj", "attn/k", 1, (kv_heads, width), config.qkv_bias),
            ("self_attn.v_proj", "attn/v", 1, (kv_heads, width), config.qkv_bias),
            ("self_attn.o_proj", "attn/o", 2, (width, heads), config.attention_out_bias),
            ("mlp.gate_proj", "mlp/gate", 1, (inner, width), config.mlp_bias),
            ("mlp.up_proj", "mlp/up", 1, (inner, width), config.mlp_bias),
            ("mlp.down_proj", "mlp/down", 1, (width, inner), config.mlp_bias),
        ):
            kernel = (f"{path}/{part}/kernel",)
            found.append(Entry(f"{name}.{hf_part}.weight", kernel, linear(input_axes), (size_out, size_in)))
            if has_bias:
                bias = (f"{path}/{part}/bias",)
                found.append(Entry(f"{name}.{hf_part}.bias", bias, vector(), (size_out,)))
    return found


FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    read_config=read_config,
    entries=entries,
    base_prefix="model.",
    ignored=(r"\.rotary_emb\.inv_freq$",),
)
