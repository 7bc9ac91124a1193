# SPDX-License-Identifier: Apache-2.0
"""`jrl generate`: prompts completed by a checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jrl.data.batching import pad_left
from jrl.data.tokenizer import load_tokenizer, tokenize
from jrl.notebook import load_model


def generate(flags: argparse.Namespace, overrides: list[str]) -> Callable[[], None]:
    """`jrl generate`: prints every prompt with its completion; of a seq2seq model, what it writes."""
    if overrides:
        raise ValueError(f"unknown flags {overrides}.")
    _check(flags)
    model, params = load_model(flags.model)
    if flags.beta is not None and "q_heads" not in params:
        raise ValueError(f"--beta weighs Q − V, and {flags.model} holds no Q heads: `jrl ilql` writes them.")
    tokenizer = load_tokenizer(flags.model)
    seq2seq = model.lm.decoder_start_token_id is not None
    rows = tokenize(tokenizer, flags.prompt, add_special_tokens=seq2seq)
    tokens, mask = pad_left(rows, pad_token_id=tokenizer.pad_token_id)
    if not mask.any(axis=1).all():
        raise ValueError("a --prompt has no tokens; to start a document, give the BOS or EOS text.")
    positions = model.lm.max_positions
    if tokens.shape[1] + flags.max_new_tokens > positions:
        raise ValueError(
            f"the longest --prompt has {tokens.shape[1]} tokens and --max-new-tokens is {flags.max_new_tokens}, but "
            f"the model has {positions} positions."
        )

    def work() -> None:
        completions = model.generate(
            params,
            jnp.asarray(tokens),
            jnp.asarray(mask),
            jax.random.key(flags.seed),
            max_new_tokens=flags.max_new_tokens,
            temperature=flags.temperature,
            top_k=flags.top_k,
            top_p=flags.top_p,
            beta=flags.beta,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        ids = jax.device_get(completions).tolist()
        for prompt, output in zip(
            flags.prompt, tokenizer.batch_decode(ids, skip_special_tokens=True), strict=True
        ):
            print(output if seq2seq else f"{prompt}{output}")

    return work


def _check(flags: argparse.Namespace) -> None:
    """Numbers out of range, before a model is loaded."""
    for flag, fits, expected, value in (
        ("max-new-tokens", flags.max_new_tokens >= 1, "at least 1", flags.max_new_tokens),
        ("temperature", flags.temperature > 0, "positive", flags.temperature),
        ("top-k", flags.top_k >= 0, "at least 0 (0: off)", flags.top_k),
        ("top-p", 0 < flags.top_p <= 1, "above 0 and at most 1", flags.top_p),
        ("seed", flags.seed >= 0, "at least 0", flags.seed),
    ):
        if not fits:
            raise ValueError(f"--{flag} must be {expected}, got {value}.")
