# SPDX-License-Identifier: Apache-2.0
"""Fields that many tiny transformers configs share: width 32, vocabulary 97, dropout off.

The initialiser is large: activations then differ enough to tell right from wrong.
"""

from __future__ import annotations

from typing import Any

IDS: dict[str, Any] = dict(vocab_size=97, bos_token_id=1, eos_token_id=1, pad_token_id=0)

GPT: dict[str, Any] = dict(n_embd=32, n_layer=2, n_head=4, n_positions=128, n_inner=64, **IDS)
GPT |= dict(embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, initializer_range=0.1)
"""For configs with GPT-2's names."""

MODERN: dict[str, Any] = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
)
MODERN |= dict(num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.1, **IDS)
"""For configs with LLaMA's names."""
