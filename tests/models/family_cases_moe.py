# SPDX-License-Identifier: Apache-2.0
"""Tiny configs of the families with a mixture of experts."""

from __future__ import annotations

from typing import Any

from transformers import MixtralConfig, Qwen3MoeConfig

from tests.models.case_fields import MODERN

MIXTRAL = MODERN | dict(num_local_experts=5, num_experts_per_tok=2)
QWEN = MODERN | dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24, head_dim=16)
CASES: dict[str, Any] = {
    "mixtral": MixtralConfig(**MIXTRAL),
    "mixtral-window": MixtralConfig(
        **MIXTRAL | dict(num_experts_per_tok=1), sliding_window=8, head_dim=16, tie_word_embeddings=True
    ),
    "qwen3_moe": Qwen3MoeConfig(**QWEN, norm_topk_prob=True),
    "qwen3_moe-some-layers": Qwen3MoeConfig(
        **QWEN | dict(num_hidden_layers=4, attention_bias=True), decoder_sparse_step=2, mlp_only_layers=[3]
    ),
    "qwen3_moe-window": Qwen3MoeConfig(
        **QWEN, use_sliding_window=True, sliding_window=8, max_window_layers=2
    ),
}
