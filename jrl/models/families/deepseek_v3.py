# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3 (DeepSeek-AI 2024, arXiv:2412.19437): latent attention, and experts behind some dense layers.

Kimi K2 (Kimi team 2025, arXiv:2507.20534) has the same form, and is read as this. The layer of multi-token prediction
behind the last one serves speculative decoding alone and is left out, as in transformers.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jrl.models.config import Experts, LatentAttention, LayerConfig, TransformerConfig
from jrl.models.families import llama_like
from jrl.models.families.base import Entry, Family, linear, linear_by_group, require
from jrl.models.families.mixtral import expert_entries, read_experts
from jrl.models.families.rope import read_rope
from jrl.models.families.tables import linear_entries, mlp_entries, norm_entries

ROUTER_KEYS = MappingProxyType({"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1})
"""Keys of published configs that no class of transformers declares, and the one value that is implemented."""


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `DeepseekV3Config`, or what Kimi K2 has in its place.

    Raises:
      ValueError: If sizes of heads or experts do not fit together, or the activation, the router or the scaling of the
        rotary positions is not implemented.
    """
    fields = hf.to_dict()
    for key, only in ROUTER_KEYS.items():
        require("deepseek_v3", key, only, fields.get(key, only), "no other router is implemented")
    is_sparse = [index >= hf.first_k_dense_replace for index in range(hf.num_hidden_layers)]
    return read_latent("deepseek_v3", hf, is_sparse)


def read_latent(model_type: str, hf: Any, is_sparse: list[bool]) -> TransformerConfig:
    """A decoder with latent attention.

    Args:
      model_type: Of the config.
      hf: A transformers config with DeepSeek's names.
      is_sparse: Which layers have experts.
    Raises:
      ValueError: As `read_config` does.
    """
    mixer = read_latent_sizes(model_type, hf)
    head_dim = mixer.plain_dim + mixer.rope_dim
    rope = read_rope(
        model_type, hf.rope_parameters, hf.qk_rope_head_dim, interleaved=bool(hf.rope_interleave)
    )
    plain = LayerConfig(
        head_dim**-0.5 * _sharpening(hf.rope_parameters) ** 2,
        rope=replace(rope, dim=hf.qk_rope_head_dim),
        mixer=mixer,
    )
    experts = read_grouped_experts(model_type, hf)
    layers = tuple(replace(plain, experts=experts if sparse else None) for sparse in is_sparse)
    common = llama_like.read_config(model_type, hf, layers, hf.hidden_act)
    return replace(
        common,
        head_dim=head_dim,
        qkv_bias=hf.attention_bias,
        attention_out_bias=hf.attention_bias,
    )


def read_latent_sizes(model_type: str, hf: Any) -> LatentAttention:
    """The sizes of latent attention.

    Raises:
      ValueError: If there are fewer heads of keys than of queries.
    """
    heads = hf.num_attention_heads
    require(
        model_type, "num_key_value_heads", heads, hf.num_key_value_heads, "every head has its own latent keys"
    )
    return LatentAttention(
        hf.q_lora_rank, hf.kv_lora_rank, hf.qk_nope_head_dim, hf.qk_rope_head_dim, hf.v_head_dim
    )


def _sharpening(parameters: Any) -> float:
    """What DeepSeek's scores are multiplied by, twice, under YaRN."""
    weight = parameters.get("mscale_all_dim", 0)
    if parameters["rope_type"] == "default" or not weight or parameters["factor"] <= 1:
        return 1.0
    return float(0.1 * weight * math.log(parameters["factor"]) + 1.0)


def read_grouped_experts(model_type: str, hf: Any, count_key: str = "n_routed_experts") -> Experts:
    """Experts in groups, chosen by sigmoids, and those that all tokens share, as one.

    Args:
      model_type: Of the config.
      hf: A transformers config with DeepSeek's names, or others that it knows by these too.
      count_key: Name of the number of experts in config.json.
    Raises:
      ValueError: If numbers of experts or groups do not fit together.
    """
    count = hf.to_dict()[count_key]
    experts = read_experts(
        model_type, hf, hf.moe_intermediate_size, renormalize=bool(hf.norm_topk_prob), count=count
    )
    size = count // hf.n_group
    if count % hf.n_group or size < 2 or not 1 <= hf.topk_group <= hf.n_group:
        raise ValueError(
            f"{model_type}: `{hf.attribute_map.get('n_group', 'n_group')}` must divide {count_key} = {count} into "
            f"groups of at least 2, of which `topk_group` are visited; got {hf.n_group} and {hf.topk_group}."
        )
    if hf.num_experts_per_tok > size * hf.topk_group:
        raise ValueError(
            f"{model_type}: `num_experts_per_tok` must be at most the {size * hf.topk_group} experts of `topk_group` = "
            f"{hf.topk_group} groups, got {hf.num_experts_per_tok}."
        )
    return replace(
        experts,
        scoring="sigmoid",
        groups=hf.n_group,
        groups_per_token=hf.topk_group,
        scale=float(hf.routed_scaling_factor),
        shared_width=hf.moe_intermediate_size * hf.n_shared_experts or None,
    )


def entries(config: TransformerConfig) -> list[Entry]:
    """Every tensor of a DeepSeek-V3 checkpoint."""
    found = llama_like.outer_entries(config)
    for index, layer in enumerate(config.layers):
        assert isinstance(layer.mixer, LatentAttention)
        name, path = f"model.layers.{index}", f"layers_{index}"
        found += llama_like.block_norm_entries(config, index)
        found += latent_entries(config, layer.mixer, f"{name}.self_attn", f"{path}/attn")
        found += feed_forward_entries(config, layer, f"{name}.mlp", path)
    return found


def latent_entries(config: TransformerConfig, sizes: LatentAttention, name: str, path: str) -> list[Entry]:
    """Latent attention, at `name` in the checkpoint and `path` among the parameters."""
    heads, width, bias = config.num_heads, config.width, config.qkv_bias
    queries, query_rank = heads * config.head_dim, sizes.query_rank
    if query_rank is None:
        found = linear_entries(f"{name}.q_proj", (f"{path}/q",), width, queries, bias=False)
    else:
        found = [
            *linear_entries(f"{name}.q_a_proj", (f"{path}/q_down",), width, query_rank, bias=bias),
            *norm_entries(config, f"{name}.q_a_layernorm", f"{path}/q_norm", query_rank),
            *linear_entries(f"{name}.q_b_proj", (f"{path}/q_up",), query_rank, queries, bias=False),
        ]
    down, up = (f"{path}/kv_down", f"{path}/k_rope"), (f"{path}/k_up", f"{path}/v_up")
    expanded = heads * (sizes.plain_dim + sizes.value_dim)
    return [
        *found,
        *linear_entries(f"{name}.kv_a_proj_with_mqa", down, width, sizes.rank + sizes.rope_dim, bias=bias),
        *norm_entries(config, f"{name}.kv_a_layernorm", f"{path}/kv_norm", sizes.rank),
        *linear_entries(
            f"{name}.kv_b_proj", up, sizes.rank, expanded, bias=False, weight=linear_by_group(heads)
        ),
        *linear_entries(
            f"{name}.o_proj",
            (f"{path}/o",),
            heads * sizes.value_dim,
            width,
            bias=config.attention_out_bias,
            weight=linear(2),
        ),
    ]


def feed_forward_entries(
    config: TransformerConfig,
    layer: LayerConfig,
    name: str,
    path: str,
    *,
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> list[Entry]:
    """The MLP, or experts with those that all tokens share.

    Args:
      config: Of the decoder.
      layer: Of this block.
      name: Of the module in the checkpoint, "model.layers.0.mlp".
      path: Of the block's parameters, "layers_0".
      parts: Names of gate, up and down of an expert there.
    """
    experts = layer.experts
    if experts is None:
        return mlp_entries(config, name, f"{path}/mlp")
    gate, up, down = parts
    found = expert_entries(config, experts, name, f"{path}/experts", gate=gate, up=up, down=down)
    if experts.shared_width is not None:
        shared = replace(config, mlp_width=experts.shared_width)
        found += mlp_entries(shared, f"{name}.shared_experts", f"{path}/shared_mlp")
    return found


FAMILY = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    read_config=read_config,
    entries=entries,
    base_prefix="model.",
    ignored=llama_like.IGNORED,
    has_prediction_layer=True,
)
