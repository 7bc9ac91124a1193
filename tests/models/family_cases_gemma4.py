# SPDX-License-Identifier: Apache-2.0
"""Tiny configs of Gemma 4, whose layers differ in their heads, lend their keys and read inputs of their own."""

from __future__ import annotations

from typing import Any

from transformers import Gemma4TextConfig

from tests.models.case_fields import MODERN

SLIDING, FULL = "sliding_attention", "full_attention"
# What a layer adds is normalised, and may be nearly 0 before. With a small epsilon rounding is then seen in full: torch
# in float32 is further from torch in float64 than jrl is.
HEADS = MODERN | dict(head_dim=8, global_head_dim=12, num_global_key_value_heads=1, sliding_window=8)
HEADS |= dict(rms_norm_eps=1e-1)
INPUTS = dict(vocab_size_per_layer_input=103, hidden_size_per_layer_input=6)
NO_INPUTS = dict(hidden_size_per_layer_input=0)
# Layers 0 to 2 have keys of their own, and 3 and 4 read those of 2 and 1.
GEMMA4: dict[str, Any] = HEADS | INPUTS | dict(num_hidden_layers=5, attention_k_eq_v=True)
GEMMA4 |= dict(layer_types=[SLIDING, FULL, SLIDING, SLIDING, FULL], num_kv_shared_layers=2)
GEMMA4 |= dict(use_double_wide_mlp=True, final_logit_softcapping=3.0)

CASES: dict[str, Any] = {
    "gemma4_text": Gemma4TextConfig(**GEMMA4),
    "gemma4_text-own-keys": Gemma4TextConfig(
        **HEADS | NO_INPUTS | dict(num_hidden_layers=3, layer_types=[SLIDING, FULL, FULL]),
        attention_k_eq_v=True,
        attention_bias=True,
        tie_word_embeddings=False,
    ),
    "gemma4_text-equal-heads": Gemma4TextConfig(
        **MODERN | INPUTS | dict(head_dim=16, global_head_dim=16, sliding_window=8, num_hidden_layers=4),
        layer_types=[SLIDING, FULL, SLIDING, FULL],
        num_kv_shared_layers=1,
        rms_norm_eps=1e-1,
        rope_parameters={
            SLIDING: dict(rope_type="linear", rope_theta=100.0, factor=2.0),
            FULL: dict(rope_type="proportional", rope_theta=50.0, partial_rotary_factor=0.7, factor=3.0),
        },
    ),
    "gemma4_text-experts": Gemma4TextConfig(
        **HEADS | NO_INPUTS | dict(num_hidden_layers=3, layer_types=[FULL, SLIDING, FULL]),
        enable_moe_block=True,
        num_experts=5,
        top_k_experts=2,
        moe_intermediate_size=24,
        attention_k_eq_v=True,
    ),
    "gemma4_text-all-share": Gemma4TextConfig(
        **HEADS | INPUTS | dict(num_hidden_layers=5, hidden_activation="gelu"),
        layer_types=[SLIDING, FULL, SLIDING, SLIDING, FULL],
        num_kv_shared_layers=3,
        use_bidirectional_attention="vision",
    ),
}
