# SPDX-License-Identifier: Apache-2.0
"""The first stage: a GPT-2 with random weights reads the walks, and knows the edges but prefers no way."""

from __future__ import annotations

from pathlib import Path

import jax
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, PreTrainedTokenizerFast

import jrl

# The shape of trlX's base model: 1,655,280 parameters at a vocabulary of 23.
ARCHITECTURE = dict(n_layer=6, n_embd=144, n_head=12, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def pretrain(walks: list[str], letters: str, folder: Path, *, config: jrl.TRLConfig, seed: int) -> Path:
    """Trains a language model of the walks.

    Args:
      walks: Strings of letters.
      letters: The alphabet.
      folder: `initial` (random weights), `sft` (the run) and `sft_model` (the result) are written there.
      config: SFT recipe.
      seed: Of the weights and the data order.
    Returns:
      Folder of the trained checkpoint, the tokenizer included.
    """
    tokenizer = letter_tokenizer(letters)
    architecture = architecture_for(tokenizer)
    model, params = jrl.load_model(architecture, key=jax.random.key(seed))
    jrl.save_model(folder / "initial", model, params, tokenizer)
    trainer = jrl.train(
        model_path=str(folder / "initial"),
        samples=walks,
        eval_prompts=sorted({walk[0] for walk in walks}),
        config=config.evolve(
            train={"seed": seed, "checkpoint_dir": str(folder / "sft")},
        ),
    )
    if trainer.interrupted:
        raise SystemExit(0)
    return Path(trainer.save_pretrained(folder / "sft_model"))


def architecture_for(tokenizer: PreTrainedTokenizerFast) -> GPT2Config:
    """The config of a GPT-2 of this size with the tokenizer's vocabulary and special tokens."""
    return GPT2Config(
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **ARCHITECTURE,
    )


def letter_tokenizer(letters: str) -> PreTrainedTokenizerFast:
    """One token a letter, and two special ones: an EOS that also begins a text, and a PAD."""
    vocabulary = {token: i for i, token in enumerate([*letters, "<eos>", "<pad>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<eos>",
        eos_token="<eos>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )
