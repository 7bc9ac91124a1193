# SPDX-License-Identifier: Apache-2.0
"""Tiny configs of the llama-like families."""

from __future__ import annotations

from typing import Any

from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from tests.models.case_fields import MODERN

LLAMA3 = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=32)
LINEAR = dict(rope_type="linear", rope_theta=1e4, factor=4.0)
DYNAMIC = dict(rope_type="dynamic", rope_theta=1e4, factor=4.0)
# Such a short original context that dimensions of all three kinds are among the few of a tiny head.
YARN = dict(rope_type="yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=32)
YARN |= dict(beta_fast=4.0, beta_slow=1.0)
DEEPSEEK_YARN = YARN | dict(mscale=1.0, mscale_all_dim=0.5, truncate=False)

DEEP = MODERN | dict(num_hidden_layers=4)
WIDE_HEADS = dict(head_dim=16)
WINDOW = dict(sliding_window=8)
LATE_WINDOW = WINDOW | dict(use_sliding_window=True, max_window_layers=2)
# An epsilon that is seen beside the scaled embedding.
GEMMA = MODERN | WIDE_HEADS | dict(rms_norm_eps=1e-3)
GEMMA2 = GEMMA | WINDOW | dict(num_hidden_layers=4, query_pre_attn_scalar=24)
GEMMA3 = GEMMA2 | dict(num_hidden_layers=7)
GLOBAL_LINEAR = dict(
    full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0),
    sliding_attention=dict(rope_type="default", rope_theta=1e4),
)

CASES: dict[str, Any] = {
    "llama-tied": LlamaConfig(**MODERN, tie_word_embeddings=True),
    "llama-all-heads": LlamaConfig(**MODERN | WIDE_HEADS | dict(num_key_value_heads=4)),
    "llama-biases": LlamaConfig(**MODERN, attention_bias=True, mlp_bias=True),
    "llama-linear": LlamaConfig(**MODERN, rope_parameters=dict(LINEAR)),
    "llama-dynamic": LlamaConfig(**MODERN, rope_parameters=dict(DYNAMIC)),
    "llama-3": LlamaConfig(**MODERN, rope_parameters=dict(LLAMA3)),
    "llama-yarn": LlamaConfig(**MODERN | WIDE_HEADS, rope_parameters=dict(DEEPSEEK_YARN)),
    "mistral": MistralConfig(**MODERN | WINDOW),
    "mistral-no-window": MistralConfig(**MODERN | WIDE_HEADS | dict(sliding_window=None)),
    "qwen2": Qwen2Config(**MODERN),
    "qwen2-tied": Qwen2Config(**MODERN, tie_word_embeddings=True),
    "qwen2-windows": Qwen2Config(**DEEP | LATE_WINDOW),
    "qwen2-yarn": Qwen2Config(**MODERN, rope_parameters=dict(YARN)),
    "qwen3": Qwen3Config(**MODERN | WIDE_HEADS),
    "qwen3-biases": Qwen3Config(
        **DEEP | WIDE_HEADS | LATE_WINDOW, attention_bias=True, tie_word_embeddings=True
    ),
    "qwen3-yarn": Qwen3Config(**MODERN | WIDE_HEADS, rope_parameters=dict(YARN)),
    "gemma": GemmaConfig(**GEMMA),
    "gemma-one-kv-head": GemmaConfig(**GEMMA | dict(num_key_value_heads=1), attention_bias=True),
    "gemma2": Gemma2Config(**GEMMA2, attn_logit_softcapping=5.0, final_logit_softcapping=3.0),
    "gemma2-no-caps": Gemma2Config(**GEMMA2, attn_logit_softcapping=None, final_logit_softcapping=None),
    "gemma3_text": Gemma3TextConfig(**GEMMA3),
    "gemma3_text-linear": Gemma3TextConfig(
        **GEMMA3 | dict(num_hidden_layers=3),
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        rope_parameters=GLOBAL_LINEAR,
        final_logit_softcapping=3.0,
    ),
    "olmo2": Olmo2Config(**MODERN),
    "olmo2-biases": Olmo2Config(**MODERN, attention_bias=True, tie_word_embeddings=True),
    "smollm3": SmolLM3Config(**DEEP),
    "smollm3-windows": SmolLM3Config(
        **DEEP | WINDOW, use_sliding_window=True, no_rope_layer_interval=2, tie_word_embeddings=False
    ),
    "smollm3-biases": SmolLM3Config(
        **MODERN, no_rope_layers=[0, 1], attention_bias=True, mlp_bias=True, rope_parameters=dict(YARN)
    ),
}
