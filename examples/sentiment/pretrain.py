# SPDX-License-Identifier: Apache-2.0
"""The first stage: a small GPT-2 with random weights learns to write reviews like those of the corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
from transformers import GPT2Config

import jrl

from .corpus import Corpus
from .tokenizer import train_tokenizer

VOCAB_SIZE = 2560  # more than the merges there are: every word of the corpus is then one token
ARCHITECTURE = {
    "n_layer": 2,
    "n_embd": 128,
    "n_head": 4,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}


def pretrain(
    corpus: Corpus, folder: Path, *, config: jrl.TRLConfig, tokenizer_path: str | None = None, seed: int
) -> Path | None:
    """Fine-tunes a policy from scratch on the training reviews.

    Args:
      corpus: Reviews and held-out prompts; samples on a few of the latter are shown on the way.
      folder: Run folder. `initial` (random weights), `sft` (the run) and `sft_model` (the result) are written
        there.
      config: SFT recipe.
      tokenizer_path: Tokenizer to use; None trains one on the corpus.
      seed: Of the weights and the data order.
    Returns:
      Folder of the trained checkpoint, the tokenizer included; None if the process was asked to stop.
    """
    tokenizer = (
        jrl.load_tokenizer(tokenizer_path)
        if tokenizer_path
        else train_tokenizer(corpus.train_reviews, vocab_size=VOCAB_SIZE, max_length=config.train.seq_length)
    )
    model, params = jrl.load_model(gpt2_config(tokenizer, config.train.seq_length), key=jax.random.key(seed))
    jrl.save_model(folder / "initial", model, params, tokenizer)
    trainer = jrl.train(
        model_path=str(folder / "initial"),
        samples=corpus.train_reviews,
        eval_prompts=corpus.eval_prompts[:4],
        config=config.evolve(
            train={"seed": seed, "checkpoint_dir": str(folder / "sft")},
        ),
    )
    if trainer.interrupted:
        return None
    return Path(trainer.save_pretrained(folder / "sft_model"))


def gpt2_config(tokenizer: Any, num_positions: int) -> GPT2Config:
    """Architecture of the policy, for a tokenizer and a context length in tokens."""
    return GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=num_positions,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **ARCHITECTURE,
    )
