# SPDX-License-Identifier: Apache-2.0
"""Gemma 4 without its eyes and ears (Google 2026): heads by type of layer, lent keys, inputs for every layer.

Layers with full attention have heads of their own width and number, and may take their values from what makes the keys.
The last layers may read the keys and values of the last layer of their type before them. Embeddings by layer are those
of Gemma 3n. The number that scales the stream after a block is a buffer in torch, and trains nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jrl.models.config import Experts, LayerConfig, Rope, TransformerConfig
from jrl.models.families import llama_like
from jrl.models.families.base import Entry, Family, require, stacked_linear, table, vector
from jrl.models.families.rope import read_proportional_rope, read_rope, without_truncate
from jrl.models.families.tables import linear_entries, norm_entries

MODEL_TYPE = "gemma4_text"
OWN_SIZES = ("head_dim", "num_key_value_heads")
"""Keys that `per_layer_config` may set for a layer."""


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `Gemma4TextConfig`.

    Raises:
      ValueError: If attention is bidirectional, a layer has sizes of its own that are not implemented, the lent keys or
        the inputs of the layers do not fit, or the activation, the types of layers or a rotary scaling is not
        implemented.
    """
    fields = hf.to_dict()
    # "vision" means the tokens of images, of which there are none.
    found = None if hf.use_bidirectional_attention == "vision" else hf.use_bidirectional_attention
    because = "a language model reads backwards only"
    require(MODEL_TYPE, "use_bidirectional_attention", None, found, because)
    rows, width = hf.vocab_size_per_layer_input, hf.hidden_size_per_layer_input or None
    if width is not None and rows < hf.vocab_size:
        raise ValueError(
            f"{MODEL_TYPE}: `vocab_size_per_layer_input` must be at least `vocab_size`, {hf.vocab_size}, got {rows}: "
            "every token has a row of inputs for the layers."
        )
    common = llama_like.read_config(
        MODEL_TYPE,
        hf,
        _read_layers(hf, fields),
        hf.hidden_activation,
        num_kv_heads=fields["num_key_value_heads"],
    )
    return replace(
        common,
        block="sandwich",
        qkv_bias=hf.attention_bias,
        attention_out_bias=hf.attention_bias,
        qk_norm="head",
        value_norm=True,
        logit_softcap=hf.final_logit_softcapping,
        embedding_scale=hf.hidden_size**0.5,
        layer_input_width=width,
        layer_input_rows=None if width is None else rows,
        stream_scale=True,
    )


def _read_layers(hf: Any, fields: Mapping[str, Any]) -> tuple[LayerConfig, ...]:
    windows = llama_like.read_windows(MODEL_TYPE, hf)
    sources = _read_sources(hf)
    experts = _read_experts(hf)
    own = {int(index): sizes for index, sizes in (fields.get("per_layer_config") or {}).items()}
    found = []
    for index, (kind, window, source) in enumerate(zip(hf.layer_types, windows, sources, strict=True)):
        sizes = own.get(index, {})
        others = sorted(sizes.keys() - set(OWN_SIZES))
        if others:
            raise ValueError(
                f"{MODEL_TYPE}: `per_layer_config` must set none but {', '.join(OWN_SIZES)}, got {', '.join(others)} "
                f"of layer {index}."
            )
        head_dim = sizes.get("head_dim")
        rope = _read_rope(hf.rope_parameters[kind], head_dim or fields["head_dim"])
        layer = LayerConfig(
            1.0,
            window,
            rope if head_dim is None else replace(rope, dim=rope.dim or head_dim),
            experts=experts,
            head_dim=head_dim,
            num_kv_heads=sizes.get("num_key_value_heads"),
            keys_as_values=hf.attention_k_eq_v and window is None and source is None,
            keys_of=source,
            lends_keys=index in sources,
        )
        is_double = hf.use_double_wide_mlp and source is not None
        found.append(replace(layer, mlp_width=2 * hf.intermediate_size) if is_double else layer)
    return tuple(found)


def _read_experts(hf: Any) -> Experts | None:
    """The mixture of experts beside the MLP of every layer; None where there is none, of which other keys may tell."""
    count, per_token, width = hf.num_experts, hf.top_k_experts, hf.moe_intermediate_size
    if not hf.enable_moe_block:
        return None
    if not (count and per_token and width and per_token <= count):
        raise ValueError(
            f"{MODEL_TYPE}: `top_k_experts` must be between 1 and `num_experts`, and `moe_intermediate_size` be given, "
            f"where `enable_moe_block` is true; got {per_token}, {count} and {width}."
        )
    return Experts(count, per_token, width, renormalize=True, beside_mlp=True, scaled_router=True)


def _read_rope(parameters: Mapping[str, Any], head_dim: int) -> Rope:
    if parameters.get("rope_type") == "proportional":
        return read_proportional_rope(MODEL_TYPE, parameters, head_dim)
    return read_rope(MODEL_TYPE, without_truncate(parameters), head_dim)


def _read_sources(hf: Any) -> tuple[int | None, ...]:
    """The layer whose keys and values each layer reads; None: its own."""
    count = hf.num_hidden_layers - hf.num_kv_shared_layers
    last = {kind: index for index, kind in enumerate(hf.layer_types[: max(count, 0)])}
    shared = hf.layer_types[count:]
    if hf.num_kv_shared_layers < 0 or not all(kind in last for kind in shared):
        raise ValueError(
            f"{MODEL_TYPE}: `num_kv_shared_layers` must be a number of last layers, for each type of which there is a "
            f"layer before them that has keys and values; got {hf.num_kv_shared_layers} of {hf.num_hidden_layers} "
            "layers."
        )
    return (*(None for _ in range(count)), *(last[kind] for kind in shared))


def entries(config: TransformerConfig) -> list[Entry]:
    """Every tensor of a Gemma 4 text checkpoint."""
    found = llama_like.entries(config)
    for index, layer in enumerate(config.layers):
        name, path = f"model.layers.{index}", f"layers_{index}"
        if layer.experts is not None:
            found += _expert_entries(config, layer.experts, name, path)
        found.append(Entry(f"{name}.layer_scalar", (f"{path}/stream_scale",), vector(), (1,)))
    return found + _layer_input_entries(config)


def _expert_entries(config: TransformerConfig, experts: Experts, name: str, path: str) -> list[Entry]:
    """Router and experts of one layer, and the norms around these and the MLP; the experts lie in two tensors."""
    count, width, inner, own = experts.count, config.width, experts.width, f"{path}/experts"
    wide = (f"{own}/gate", f"{own}/up")
    return [
        *linear_entries(f"{name}.router.proj", (f"{own}/router",), width, count, bias=False),
        Entry(f"{name}.router.scale", (f"{own}/router_norm/scale",), vector(), (width,)),
        Entry(f"{name}.router.per_expert_scale", (f"{own}/answer_scale",), vector(), (count,)),
        Entry(f"{name}.experts.gate_up_proj", wide, stacked_linear(), (count, 2 * inner, width)),
        Entry(f"{name}.experts.down_proj", (f"{own}/down",), stacked_linear(), (count, width, inner)),
        *norm_entries(config, f"{name}.pre_feedforward_layernorm_2", f"{path}/experts_norm"),
        *norm_entries(config, f"{name}.post_feedforward_layernorm_1", f"{path}/mlp_part_norm"),
        *norm_entries(config, f"{name}.post_feedforward_layernorm_2", f"{path}/experts_out_norm"),
    ]


def _layer_input_entries(config: TransformerConfig) -> list[Entry]:
    """What layers read beside the stream: a table and a projection for all, then what each of them does with it."""
    narrow, wide, rows = config.layer_input_width, config.width, config.layer_input_rows
    if narrow is None or rows is None:
        return []
    together = config.num_layers * narrow
    found = [
        Entry("model.embed_tokens_per_layer.weight", ("layer_embed/embedding",), table(), (rows, together)),
        *linear_entries("model.per_layer_model_projection", ("layer_embed_in",), wide, together, bias=False),
        *norm_entries(config, "model.per_layer_projection_norm", "layer_embed_norm", narrow),
    ]
    for index in range(config.num_layers):
        name, path = f"model.layers.{index}", f"layers_{index}"
        gate, out = f"{name}.per_layer_input_gate", f"{name}.per_layer_projection"
        found += linear_entries(gate, (f"{path}/input_gate",), wide, narrow, bias=False)
        found += linear_entries(out, (f"{path}/input_out",), narrow, wide, bias=False)
        found += norm_entries(config, f"{name}.post_per_layer_input_norm", f"{path}/input_norm")
    return found


def unread_keys(config: TransformerConfig) -> tuple[str, ...]:
    """Patterns of the keys and values of layers that read those of others: published checkpoints hold them, unread."""
    readers = [str(index) for index, layer in enumerate(config.layers) if layer.keys_of is not None]
    return (rf"layers\.({'|'.join(readers)})\.self_attn\.[kv]_(proj|norm)\.",) if readers else ()


FAMILY = Family(
    model_type=MODEL_TYPE,
    architecture="Gemma4ForCausalLM",
    read_config=read_config,
    entries=entries,
    base_prefix="model.",
    ignored=llama_like.IGNORED,
    ignored_in=unread_keys,
)
