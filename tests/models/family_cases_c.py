# SPDX-License-Identifier: Apache-2.0
"""Tiny configs of the families of 2024 to 2026 that are a table of facts each."""

from __future__ import annotations

from typing import Any

from transformers import (
    ArceeConfig,
    Cohere2Config,
    CohereConfig,
    Ernie4_5Config,
    Exaone4Config,
    FalconConfig,
    Glm4Config,
    GptOssConfig,
    GraniteConfig,
    HunYuanDenseV1Config,
    Llama4TextConfig,
    Ministral3Config,
    MinistralConfig,
    NemotronConfig,
    Olmo3Config,
    PhiConfig,
    Qwen2MoeConfig,
    SeedOssConfig,
    StableLmConfig,
    Starcoder2Config,
)

from tests.models.case_fields import IDS, MODERN
from tests.models.family_cases_b import DEEP, WIDE_HEADS, WINDOW, YARN

TYPES = dict(layer_types=["sliding_attention", "full_attention"])
MULTIPLIERS = dict(
    embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.1, logits_scaling=2.5
)
SHARED = dict(
    num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24, shared_expert_intermediate_size=20
)
SHARED |= dict(norm_topk_prob=True)
FALCON: dict[str, Any] = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_hidden_size=48)
FALCON |= dict(max_position_embeddings=128, initializer_range=0.1, **IDS)
# So short that the queries grow thrice within the rows of the tests.
GROWTH = YARN | dict(original_max_position_embeddings=12, llama_4_scaling_beta=0.3)
NO_DROPOUT = dict(attention_dropout=0.0, residual_dropout=0.0)
OSS = MODERN | WIDE_HEADS | WINDOW | dict(num_local_experts=5, num_experts_per_tok=2)
# So low a limit that it cuts off some of every expert's numbers.
OSS |= dict(swiglu_limit=0.5, rope_parameters=YARN | dict(truncate=False))

LLAMA4 = MODERN | dict(num_local_experts=5, intermediate_size=24, intermediate_size_mlp=40, head_dim=12)
LLAMA4 |= dict(num_hidden_layers=4, attention_chunk_size=8, interleave_moe_layer_step=2)

CASES: dict[str, Any] = {
    "ministral": MinistralConfig(**MODERN | WINDOW | WIDE_HEADS),
    "ministral-types": MinistralConfig(**MODERN | WINDOW, head_dim=8, **TYPES),
    "ministral3": Ministral3Config(**MODERN | WIDE_HEADS, rope_parameters=dict(GROWTH)),
    "ministral3-window": Ministral3Config(
        **MODERN | WIDE_HEADS | WINDOW, rope_parameters=GROWTH | dict(mscale=1.0, mscale_all_dim=0.5)
    ),
    "olmo3": Olmo3Config(**DEEP | WINDOW),
    "olmo3-yarn": Olmo3Config(
        **MODERN | WINDOW,
        **TYPES,
        attention_bias=True,
        tie_word_embeddings=True,
        rope_parameters=dict(
            full_attention=dict(YARN), sliding_attention=dict(rope_type="default", rope_theta=50.0)
        ),
    ),
    "granite": GraniteConfig(**MODERN, **MULTIPLIERS),
    "granite-biases": GraniteConfig(
        **MODERN, **MULTIPLIERS, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "seed_oss": SeedOssConfig(**MODERN | WIDE_HEADS, **NO_DROPOUT),
    "seed_oss-biases": SeedOssConfig(
        **MODERN, **NO_DROPOUT, head_dim=None, attention_bias=False, attention_out_bias=True, mlp_bias=True
    ),
    "exaone4": Exaone4Config(**DEEP | WINDOW),
    "exaone4-no-window": Exaone4Config(
        **MODERN, sliding_window=None, layer_types=["full_attention"] * 2, tie_word_embeddings=True
    ),
    "hunyuan_v1_dense": HunYuanDenseV1Config(**MODERN | WIDE_HEADS),
    "hunyuan_v1_dense-alpha": HunYuanDenseV1Config(
        **MODERN | WIDE_HEADS,
        attention_bias=True,
        tie_word_embeddings=True,
        rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, alpha=50.0, factor=1.0),
    ),
    "ernie4_5": Ernie4_5Config(**MODERN | WIDE_HEADS),
    "ernie4_5-biases": Ernie4_5Config(**MODERN, head_dim=None, use_bias=True, tie_word_embeddings=False),
    "arcee": ArceeConfig(**MODERN),
    "arcee-biases": ArceeConfig(
        **MODERN, attention_bias=True, mlp_bias=True, rope_parameters=dict(YARN), tie_word_embeddings=True
    ),
    "glm4": Glm4Config(**MODERN | WIDE_HEADS),
    "glm4-no-biases": Glm4Config(
        **MODERN | WIDE_HEADS, attention_bias=False, partial_rotary_factor=1.0, tie_word_embeddings=True
    ),
    "cohere": CohereConfig(**MODERN, logit_scale=0.3),
    "cohere-qk-norm": CohereConfig(
        **MODERN, logit_scale=0.3, use_qk_norm=True, attention_bias=True, tie_word_embeddings=False
    ),
    "cohere2": Cohere2Config(**DEEP | WINDOW, logit_scale=0.3),
    "cohere2-biases": Cohere2Config(**MODERN | WINDOW, **TYPES, logit_scale=2.0, attention_bias=True),
    "gpt_oss": GptOssConfig(**OSS),
    "gpt_oss-no-biases": GptOssConfig(
        **OSS | dict(rope_parameters=dict(rope_type="default", rope_theta=1e4), swiglu_limit=7.0),
        attention_bias=False,
        layer_types=["full_attention", "sliding_attention"],
        tie_word_embeddings=True,
    ),
    "llama4_text": Llama4TextConfig(**LLAMA4),
    "llama4_text-two-experts": Llama4TextConfig(
        **LLAMA4 | dict(num_experts_per_tok=2, interleave_moe_layer_step=1, attention_bias=True),
        use_qk_norm=False,
        attn_temperature_tuning=False,
        no_rope_layers=[0, 1, 1, 0],
        tie_word_embeddings=True,
    ),
    "qwen2_moe": Qwen2MoeConfig(**MODERN, **SHARED),
    "qwen2_moe-some-layers": Qwen2MoeConfig(
        **DEEP | SHARED | WINDOW | dict(norm_topk_prob=False),
        qkv_bias=False,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        use_sliding_window=True,
        max_window_layers=3,
    ),
    "phi": PhiConfig(**MODERN),
    "phi-qk-norm": PhiConfig(**MODERN, qk_layernorm=True, partial_rotary_factor=0.25, hidden_act="gelu"),
    "starcoder2": Starcoder2Config(**MODERN | WINDOW),
    "starcoder2-no-biases": Starcoder2Config(**MODERN, use_bias=False, tie_word_embeddings=False),
    "stablelm": StableLmConfig(**MODERN),
    "stablelm-qk-norm": StableLmConfig(
        **MODERN, qk_layernorm=True, use_qkv_bias=True, use_parallel_residual=True, partial_rotary_factor=0.5
    ),
    "falcon": FalconConfig(**FALCON),
    "falcon-new": FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "falcon-one-norm": FalconConfig(
        **FALCON, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1, bias=True
    ),
    "falcon-sequential": FalconConfig(
        **FALCON, multi_query=False, parallel_attn=False, bias=True, tie_word_embeddings=False
    ),
    "nemotron": NemotronConfig(**MODERN | WIDE_HEADS),
    "nemotron-biases": NemotronConfig(
        **MODERN,
        attention_bias=True,
        mlp_bias=True,
        partial_rotary_factor=1.0,
        tie_word_embeddings=True,
    ),
}
