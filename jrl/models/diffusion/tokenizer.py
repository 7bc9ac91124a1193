# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of text encoders: transformers' own, under the rules that diffusion models were trained with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from jrl.models.diffusion.parts import PromptTokenizer


@dataclass(frozen=True, eq=False)
class PaddedTokenizer:
    """Texts to rows of one length: what is too long is cut, what is short is padded.

    Attributes:
      tokenizer: Of transformers.
      length: Q of every row.
    """

    tokenizer: Any
    length: int

    def __call__(self, texts: Sequence[str]) -> Int[np.ndarray, "B Q"]:
        """Ids of the texts, int32, with the special tokens that the tokenizer adds."""
        rows = self.tokenizer(list(texts), padding="max_length", truncation=True, max_length=self.length)
        return np.asarray(rows["input_ids"], np.int32).reshape(-1, self.length)

    def save_pretrained(self, folder: Path) -> None:
        """Writes the tokenizer's folder."""
        self.tokenizer.save_pretrained(folder)


@dataclass(frozen=True)
class JoinedTokenizer:
    """Tokenizers of several text encoders as one.

    Attributes:
      tokenizers: One an encoder, in their order.
    """

    tokenizers: tuple[PromptTokenizer, ...]

    def __call__(self, texts: Sequence[str]) -> Int[np.ndarray, "B Q"]:
        """Ids of the texts, int32: the rows of each encoder, end to end."""
        return np.concatenate([tokenize(texts) for tokenize in self.tokenizers], axis=1)


def load_clip_tokenizer(folder: Path, *, max_length: int, vocab_size: int) -> PaddedTokenizer:
    """Reads a tokenizer's folder.

    Args:
      folder: With vocab.json and merges.txt, or with tokenizer.json.
      max_length: Positions that the text encoder has; rows are shorter where the tokenizer says so.
      vocab_size: Entries of the text encoder's table.
    Raises:
      FileNotFoundError: If the folder holds no tokenizer.
      ValueError: If it is damaged, or does not belong to the text encoder.
    """
    # Only here: importing jrl does not import transformers.
    from transformers import CLIPTokenizer

    tokenizer = _load(
        folder,
        ("tokenizer.json", "vocab.json"),
        vocab_size,
        lambda: CLIPTokenizer.from_pretrained(folder, local_files_only=True),
    )
    return PaddedTokenizer(tokenizer, min(int(tokenizer.model_max_length), max_length))


def load_t5_tokenizer(folder: Path, *, length: int, vocab_size: int) -> PaddedTokenizer:
    """Reads the folder of a T5's tokenizer.

    Args:
      folder: With tokenizer.json, or with spiece.model, which transformers reads with sentencepiece.
      length: Q of every row.
      vocab_size: Entries of the text encoder's table.
    Raises:
      FileNotFoundError: If the folder holds no tokenizer.
      ValueError: If it is damaged, or does not belong to the text encoder.
    """
    from transformers import T5Tokenizer

    tokenizer = _load(
        folder,
        ("tokenizer.json", "spiece.model"),
        vocab_size,
        lambda: T5Tokenizer.from_pretrained(folder, local_files_only=True),
    )
    return PaddedTokenizer(tokenizer, length)


def _load(folder: Path, files: tuple[str, ...], vocab_size: int, read: Callable[[], Any]) -> Any:
    """A tokenizer of transformers, all of whose ids are below `vocab_size`; it needs one of the files."""
    if not any((folder / name).is_file() for name in files):
        raise FileNotFoundError(f"{folder} holds no tokenizer: it has neither {' nor '.join(files)}.")
    try:
        tokenizer = read()
    except Exception as error:  # tokenizers raises bare ones
        reason = " ".join(str(error).split())
        raise ValueError(f"{folder} is refused by transformers: {type(error).__name__}: {reason}") from error
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= vocab_size:
        raise ValueError(
            f"{folder}: ids must be below {vocab_size}, the entries of the text encoder's table, got {largest}. Does "
            "the tokenizer belong to it?"
        )
    return tokenizer
