# SPDX-License-Identifier: Apache-2.0
"""One tiny transformers config for every decoder family and each of its important variants.

Width 32, vocabulary 97, dropout off. Windows are shorter than the rows of the tests, so that they act.
"""

from __future__ import annotations

from typing import Any

from transformers import (
    BloomConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoConfig,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    Phi3Config,
)

from tests.models import (
    family_cases_b,
    family_cases_c,
    family_cases_gemma4,
    family_cases_mixers,
    family_cases_moe,
)
from tests.models.case_fields import GPT, IDS, MODERN

NEO: dict[str, Any] = dict(hidden_size=32, num_layers=4, num_heads=4, initializer_range=0.1, **IDS)
NEO |= dict(attention_types=[[["global", "local"], 2]], window_size=8, max_position_embeddings=128)
NEOX: dict[str, Any] = {name: value for name, value in MODERN.items() if name != "num_key_value_heads"}
OPT: dict[str, Any] = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64, **IDS)
OPT |= dict(max_position_embeddings=128, dropout=0.0, init_std=0.1)
BLOOM: dict[str, Any] = dict(hidden_size=32, n_layer=2, n_head=4, initializer_range=0.1, **IDS)
# Twice the context of the pre-training: the short factors hold up to it, and scores are sharper everywhere.
LONG: dict[str, Any] = dict(
    rope_type="longrope", rope_theta=1e4, short_factor=[1.0, 1.5], long_factor=[2.0, 9.0]
)
LONG_PHI3 = dict(original_max_position_embeddings=128, max_position_embeddings=256, partial_rotary_factor=0.5)

CASES_A: dict[str, Any] = {
    "gpt2": GPT2Config(**GPT),
    "gpt2-untied": GPT2Config(**GPT | {"tie_word_embeddings": False, "activation_function": "gelu"}),
    "gpt2-by-layer": GPT2Config(**GPT | {"scale_attn_by_inverse_layer_idx": True, "n_inner": None}),
    "gpt_bigcode": GPTBigCodeConfig(**GPT),
    "gpt_bigcode-all-heads": GPTBigCodeConfig(**GPT | {"multi_query": False, "n_inner": None}),
    "gpt_neo": GPTNeoConfig(**NEO),
    "gptj": GPTJConfig(**GPT | {"rotary_dim": 4}),
    "gpt_neox": GPTNeoXConfig(**NEOX),
    "gpt_neox-sequential": GPTNeoXConfig(**NEOX | {"use_parallel_residual": False, "attention_bias": False}),
    "gpt_neox-tied": GPTNeoXConfig(**NEOX | {"tie_word_embeddings": True, "hidden_act": "gelu_new"}),
    "opt": OPTConfig(**OPT),
    "opt-350m": OPTConfig(**OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 16}),
    "opt-no-biases": OPTConfig(**OPT | {"enable_bias": False, "tie_word_embeddings": False}),
    "bloom": BloomConfig(**BLOOM),
    "bloom-6-heads": BloomConfig(**BLOOM | {"hidden_size": 48, "n_head": 6}),
    "phi3": Phi3Config(**MODERN),
    "phi3-window": Phi3Config(**MODERN | {"sliding_window": 8}),
    "phi3-longrope": Phi3Config(**MODERN | LONG_PHI3 | {"rope_parameters": LONG}),
    "llama": LlamaConfig(**MODERN),
}

CASES: dict[str, Any] = {
    **CASES_A,
    **family_cases_b.CASES,
    **family_cases_moe.CASES,
    **family_cases_c.CASES,
    **family_cases_mixers.CASES,
    **family_cases_gemma4.CASES,
}
