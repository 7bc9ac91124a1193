# SPDX-License-Identifier: Apache-2.0
"""Falcon (Almazrouei et al. 2023, arXiv:2311.16867): attention and MLP in parallel, q, k and v in one tensor."""

from __future__ import annotations

from typing import Any

from jrl.models.config import LayerConfig, TransformerConfig
from jrl.models.families.base import Entry, Family, read_activation, require
from jrl.models.families.rope import read_rope
from jrl.models.families.tables import (
    embedding_entries,
    fused_attention_entries,
    head_entries,
    mlp_entries,
    norm_entries,
)

NORMS = {
    "pre_norm": (("input_layernorm", "attn_norm"), ("post_attention_layernorm", "mlp_norm")),
    "parallel": (("input_layernorm", "attn_norm"),),
    "parallel_two_norms": (("ln_attn", "attn_norm"), ("ln_mlp", "mlp_norm")),
}


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `FalconConfig`.

    Raises:
      ValueError: If there is ALiBi or dropout, or the norms, the activation or the rotary scaling are not implemented.
    """
    require("falcon", "alibi", False, bool(hf.alibi), "the torch model rounds this bias to bfloat16")
    for rate in ("hidden_dropout", "attention_dropout"):
        partly = "the torch model drops some of what this names, and not all"
        require("falcon", rate, 0.0, hf.to_dict()[rate] or 0.0, partly)
    head_dim = hf.hidden_size // hf.num_attention_heads
    rope = read_rope("falcon", hf.rope_parameters, head_dim)
    return TransformerConfig(
        vocab_size=hf.vocab_size,
        width=hf.hidden_size,
        layers=(LayerConfig(head_dim**-0.5, rope=rope),) * hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=_kv_heads(hf),
        head_dim=head_dim,
        mlp_width=hf.ffn_hidden_size,
        max_positions=hf.max_position_embeddings,
        activation=read_activation("falcon", hf.activation),
        gated_mlp=False,
        norm="layer",
        norm_epsilon=hf.layer_norm_epsilon,
        block=_block(hf),
        qkv_bias=bool(hf.bias),
        attention_out_bias=bool(hf.bias),
        mlp_bias=bool(hf.bias),
        tie_embeddings=hf.tie_word_embeddings,
        init_range=hf.initializer_range,
    )


def _kv_heads(hf: Any) -> int:
    several, is_one = int(hf.num_kv_heads), bool(hf.multi_query)
    if hf.new_decoder_architecture:
        return several
    return 1 if is_one else int(hf.num_attention_heads)


def _block(hf: Any) -> Any:
    if not hf.new_decoder_architecture:
        require(
            "falcon",
            "num_ln_in_parallel_attn",
            None,
            hf.num_ln_in_parallel_attn,
            "only the new decoder has two",
        )
        return "parallel" if hf.parallel_attn else "pre_norm"
    require(
        "falcon",
        "parallel_attn",
        True,
        hf.parallel_attn,
        "the new decoder computes both halves of a block at once",
    )
    norms = 2 if hf.num_ln_in_parallel_attn is None else hf.num_ln_in_parallel_attn
    return "parallel_two_norms" if norms == 2 else "parallel"


def entries(config: TransformerConfig) -> list[Entry]:
    """Every tensor of a Falcon checkpoint; q, k and v lie together by key/value head."""
    found = [
        *embedding_entries(config, "transformer.word_embeddings"),
        *norm_entries(config, "transformer.ln_f", "final_norm"),
        *head_entries(config),
    ]
    for index in range(config.num_layers):
        name, path = f"transformer.h.{index}", f"layers_{index}"
        for hf_norm, norm in NORMS[config.block]:
            found += norm_entries(config, f"{name}.{hf_norm}", f"{path}/{norm}")
        found += [
            *fused_attention_entries(config, f"{name}.self_attention", f"{path}/attn"),
            *mlp_entries(config, f"{name}.mlp", f"{path}/mlp", up="dense_h_to_4h", down="dense_4h_to_h"),
        ]
    return found


FAMILY = Family(
    model_type="falcon",
    architecture="FalconForCausalLM",
    read_config=read_config,
    entries=entries,
    base_prefix="transformer.",
    ignored=(r"\.rotary_emb\.inv_freq$",),
)
