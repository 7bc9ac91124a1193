# SPDX-License-Identifier: Apache-2.0
"""A byte-level BPE tokenizer of the corpus, trained in a second, in the format of transformers."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

EOS_TOKEN = "<|endoftext|>"
PAD_TOKEN = "<|pad|>"


def train_tokenizer(texts: Sequence[str], *, vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Learns the merges of a GPT-2 style tokenizer.

    Args:
      texts: The corpus.
      vocab_size: Number of entries, special tokens and the 256 bytes included.
      max_length: Context of the model that it will serve, in tokens.
    Returns:
      A fast tokenizer with distinct EOS and PAD; any text round-trips, since single bytes are entries too.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_TOKEN, PAD_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS_TOKEN,
        bos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
