# SPDX-License-Identifier: Apache-2.0
"""Kimi Linear (Kimi team 2025, arXiv:2510.26692): Kimi Delta Attention, some layers of latent attention, and experts.

No layer has rotary positions. In files convolutions and experts have tensors and names of their own; transformers joins
and renames them in memory, where adapters find them.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jrl.models.config import GatedDelta, LatentAttention, LayerConfig, TransformerConfig
from jrl.models.families import llama_like
from jrl.models.families.base import Entry, Family, Transform, channels, linear, require, vector
from jrl.models.families.deepseek_v3 import (
    feed_forward_entries,
    latent_entries,
    read_grouped_experts,
    read_latent_sizes,
)
from jrl.models.families.glm4_moe_lite import read_sparse
from jrl.models.families.tables import linear_entries, norm_entries

UNDECLARED = MappingProxyType(
    {
        "mla_use_nope": True,
        "mla_use_output_gate": False,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "num_nextn_predict_layers": 0,
        "routed_expert_hidden_size": None,
        "use_grouped_topk": True,
    }
)
"""Keys of published configs that the class of transformers does not declare, and the one value that is implemented."""


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `KimiLinearConfig`.

    Raises:
      ValueError: If sizes of heads or experts do not fit together, a type of layer is unknown, `linear_attn_config`
        contradicts another key, or the activation or the router is not implemented.
    """
    fields = hf.to_dict()
    for key, only in UNDECLARED.items():
        require("kimi_linear", key, only, fields.get(key, only), "nothing else is implemented")
    require("kimi_linear", "tie_word_embeddings", False, hf.tie_word_embeddings, "torch never ties the head")
    heads, width = hf.linear_num_heads, hf.linear_head_dim
    _check_linear_attn_config(hf)
    latent = read_latent_sizes("kimi_linear", hf)
    head_dim = latent.plain_dim + latent.rope_dim
    delta = GatedDelta(heads, heads, width, width, hf.linear_conv_kernel_dim, rank=width)
    kinds = {
        "full_attention": LayerConfig(head_dim**-0.5, mixer=latent),
        "linear_attention": LayerConfig(head_dim**-0.5, mixer=delta),
    }
    experts = read_grouped_experts("kimi_linear", hf, "num_experts")
    layers = tuple(
        replace(layer, experts=experts if sparse else None)
        for layer, sparse in zip(
            llama_like.read_kinds("kimi_linear", hf, kinds), read_sparse("kimi_linear", hf), strict=True
        )
    )
    return replace(
        llama_like.read_config("kimi_linear", hf, layers, hf.hidden_act),
        head_dim=head_dim,
        qkv_bias=hf.attention_bias,
        attention_out_bias=hf.attention_bias,
    )


def _check_linear_attn_config(hf: Any) -> None:
    """Refuses a mapping of the file that says more, or something else, than the keys that transformers makes of it."""
    numbers: dict[str, list[int]] = {"linear_attention": [], "full_attention": []}
    for number, kind in enumerate(hf.layer_types, start=1):
        numbers.setdefault(kind, []).append(number)
    known = {
        "head_dim": hf.linear_head_dim,
        "num_heads": hf.linear_num_heads,
        "short_conv_kernel_size": hf.linear_conv_kernel_dim,
        "kda_layers": numbers["linear_attention"],
        "full_attn_layers": numbers["full_attention"],
    }
    for key, value in hf.to_dict().get("linear_attn_config", {}).items():
        found = sorted(value) if isinstance(value, list) else value
        # What is not known must be off.
        if (found != known[key]) if key in known else value:
            raise ValueError(
                f"kimi_linear: `linear_attn_config` must say {key} = {known.get(key)!r}, got {value!r}: it contradicts "
                "another key of config.json, or asks for what is not implemented."
            )


def entries(config: TransformerConfig) -> list[Entry]:
    """Every tensor of a Kimi Linear checkpoint."""
    found = llama_like.outer_entries(config)
    for index, layer in enumerate(config.layers):
        name, path = f"model.layers.{index}", f"layers_{index}"
        found += llama_like.block_norm_entries(config, index)
        if isinstance(layer.mixer, GatedDelta):
            found += _delta_entries(config, layer.mixer, f"{name}.self_attn", f"{path}/attn")
        else:
            assert isinstance(layer.mixer, LatentAttention)
            found += latent_entries(config, layer.mixer, f"{name}.self_attn", f"{path}/attn")
        module = "mlp" if layer.experts is None else "block_sparse_moe"
        found += feed_forward_entries(config, layer, f"{name}.{module}", path, parts=("w1", "w3", "w2"))
    return found


def _delta_entries(config: TransformerConfig, sizes: GatedDelta, name: str, path: str) -> list[Entry]:
    heads, rank = sizes.value_heads, sizes.rank
    assert rank is not None
    keys, values = sizes.key_heads * sizes.key_dim, heads * sizes.value_dim
    maps = (
        ("q_proj", "q", config.width, keys),
        ("k_proj", "k", config.width, keys),
        ("v_proj", "v", config.width, values),
        ("b_proj", "rate", config.width, heads),
        ("f_a_proj", "decay_down", config.width, rank),
        ("f_b_proj", "decay_up", rank, heads * sizes.key_dim),
        ("g_a_proj", "gate_down", config.width, rank),
        ("g_b_proj", "gate_up", rank, values),
    )
    found = []
    for hf_part, part, size_in, size_out in maps:
        found += linear_entries(f"{name}.{hf_part}", (f"{path}/{part}",), size_in, size_out, bias=False)
    for part, count in (("q", keys), ("k", keys), ("v", values)):
        shape = (count, 1, sizes.taps)
        found.append(Entry(f"{name}.{part}_conv1d.weight", (f"{path}/{part}_taps",), channels(), shape))
    return [
        *found,
        Entry(f"{name}.A_log", (f"{path}/log_rates",), _by_head(), (1, 1, heads, 1)),
        Entry(f"{name}.dt_bias", (f"{path}/decay_bias",), vector(), (heads * sizes.key_dim,)),
        *norm_entries(config, f"{name}.o_norm", f"{path}/norm", sizes.value_dim),
        *linear_entries(f"{name}.o_proj", (f"{path}/o",), values, config.width, bias=False, weight=linear(2)),
    ]


def _by_head() -> Transform:
    """(1, 1, N, 1) ↔ a number of each head (N,)."""
    return Transform(
        load=lambda tensor, shapes: [tensor.reshape(shapes[0])],
        save=lambda arrays, vocab_size: arrays[0].reshape(1, 1, -1, 1),
    )


FAMILY = Family(
    model_type="kimi_linear",
    architecture="KimiLinearForCausalLM",
    read_config=read_config,
    entries=entries,
    base_prefix="model.",
    # Transformers writes the MLP of a layer without experts under the name of those with them.
    other_names=((r"\.block_sparse_moe\.(gate|up|down)_proj\.", r".mlp.\1_proj."),),
    ignored=llama_like.IGNORED,
)
