# SPDX-License-Identifier: Apache-2.0
"""What both sides of a comparison work on. Every peer's environment imports it: plain numbers alone."""

from __future__ import annotations

GPT2 = {
    "gpt2-mini": dict(n_embd=256, n_layer=6, n_head=8, vocab_size=8192, n_positions=256),
    "gpt2-124m": dict(n_embd=768, n_layer=12, n_head=12, vocab_size=50257, n_positions=256),
}
"""Fields of a `GPT2Config`, by name."""

VOCABULARY = GPT2["gpt2-124m"]["vocab_size"]
ROWS, PROMPT, RESPONSE, MINIBATCH, EPOCHS = 32, 16, 48, 8, 4
"""Rows of an iteration or of a step, tokens of each, rows of a forward pass, and PPO's passes."""
