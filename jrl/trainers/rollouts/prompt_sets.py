# SPDX-License-Identifier: Apache-2.0
"""Prompts of a run: tokenised within the budget that its configuration leaves beside the completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jrl.data.prompts import PromptSet
from jrl.trainers.config.registry import get_pipeline
from jrl.trainers.config.sections import TrainConfig
from jrl.trainers.config.trl_config import TRLConfig


def make_prompt_set(
    prompts: Sequence[Any],
    tokenizer: Any,
    config: TRLConfig,
    *,
    max_new_tokens: int,
    long_prompts: str | None = None,
    decoder_start_token_id: int | None = None,
) -> PromptSet:
    """Prompts within `seq_length - max_new_tokens` tokens.

    Args:
      prompts: Texts, or dicts with "prompt" and metadata; left untouched.
      tokenizer: The run's.
      config: The run's: `train` has `seq_length`, `seed`, `long_prompts`, and by `pipeline` the class.
      max_new_tokens: The longest completion that will follow them.
      long_prompts: What becomes of longer ones; default: `train.long_prompts`.
      decoder_start_token_id: Of a seq2seq model.
    Raises:
      ValueError: If no room is left for a prompt; else as `PromptSet`.
    """
    train = config.train
    budget = prompt_budget(train, max_new_tokens)
    return get_pipeline(train.pipeline)(
        prompts,
        tokenizer,
        max_length=budget,
        seed=train.seed,
        long_prompts=long_prompts or train.long_prompts,
        decoder_start_token_id=decoder_start_token_id,
        add_special_tokens=config.tokenizer.add_special_tokens,
    )


def prompt_budget(train: TrainConfig, max_new_tokens: int) -> int:
    """Most tokens of a prompt that so many tokens may follow.

    Raises:
      ValueError: If no room is left for a prompt.
    """
    budget = train.seq_length - max_new_tokens
    if budget < 1:
        raise ValueError(
            f"`train.seq_length` ({train.seq_length}) leaves no room for a prompt beside `max_new_tokens` "
            f"({max_new_tokens}); raise it, or lower `method.gen_kwargs.max_new_tokens`."
        )
    return budget


def document_start(tokenizer: Any) -> str:
    """The text that starts a document: the tokenizer's BOS, or its EOS where it has none.

    Raises:
      ValueError: If it has neither.
    """
    start: str | None = tokenizer.bos_token or tokenizer.eos_token
    if start is None:
        raise ValueError("The tokenizer has neither a BOS nor an EOS token to start from: give `prompts`.")
    return start
