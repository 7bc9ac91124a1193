# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of small worlds, made on the spot: every piece that their texts are cut into is a token."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def piece_tokenizer(pattern: str, texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer without merges: a text has the same tokens wherever it stands. EOS pads and is never written.

    Args:
      pattern: Regular expression of a piece.
      texts: Their pieces are the vocabulary.
    """
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    pieces = sorted({piece for text in texts for piece, _ in split.pre_tokenize_str(text)})
    vocabulary = {piece: i for i, piece in enumerate(["<eos>", "<unk>", *pieces])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = split, decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        bos_token="<eos>",
        pad_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
