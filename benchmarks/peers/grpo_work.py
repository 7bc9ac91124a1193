# SPDX-License-Identifier: Apache-2.0
"""One iteration of GRPO, in the words that `trl` and `jrl.trl` share. Either side's environment imports it."""

from __future__ import annotations

import random
from typing import Any

from sizes import GPT2
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, PreTrainedTokenizerFast

PROMPTS, SAMPLES, PROMPT, RESPONSE, MINIBATCH = 8, 8, 128, 64, 8
"""Prompts of an iteration, completions of each, tokens of either, and rows of a forward pass."""


def make_config(model: str) -> GPT2Config:
    """A model without dropout; its last id ends a text and fills rows up."""
    last = GPT2[model]["vocab_size"] - 1
    special = {"bos_token_id": last, "eos_token_id": last, "pad_token_id": last}
    return GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **GPT2[model], **special)


def make_tokenizer(model: str) -> PreTrainedTokenizerFast:
    """One word an id."""
    size = GPT2[model]["vocab_size"]
    words = {f"w{number}": number for number in range(size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=f"w{size - 1}"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    last = f"w{size - 1}"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=last, pad_token=last)


def make_rows(model: str) -> list[dict[str, str]]:
    """Prompts of the same length, random words."""
    draw, size = random.Random(0), GPT2[model]["vocab_size"]
    return [
        {"prompt": " ".join(f"w{draw.randrange(size - 1)}" for _ in range(PROMPT))}
        for _ in range(4 * PROMPTS)
    ]


def share_of_ones(completions: list[str], **others: Any) -> list[float]:
    """Share of the digit 1 in a completion: a reward that costs nothing and differs."""
    del others
    return [text.count("1") / max(len(text), 1) for text in completions]


def arguments(folder: str) -> dict[str, Any]:
    """Fields of `GRPOConfig`: one optimizer step on one set of rollouts, without a reference."""
    return {
        "output_dir": folder,
        "per_device_train_batch_size": MINIBATCH,
        "gradient_accumulation_steps": PROMPTS * SAMPLES // MINIBATCH,
        "num_generations": SAMPLES,
        "max_completion_length": RESPONSE,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "max_steps": 10**6,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
