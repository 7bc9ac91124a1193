# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of CLIP's text encoder: transformers' own, under the rule that diffusion models were trained with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int


@dataclass(frozen=True, eq=False)
class ClipTokenizer:
    """Texts to rows of one length: what is too long is cut, what is short is padded.

    Attributes:
      tokenizer: Of transformers.
      length: Q of every row.
    """

    tokenizer: Any
    length: int

    def __call__(self, texts: Sequence[str]) -> Int[np.ndarray, "B Q"]:
        """Ids of the texts, int32, each with a start and at least one end."""
        rows = self.tokenizer(list(texts), padding="max_length", truncation=True, max_length=self.length)
        return np.asarray(rows["input_ids"], np.int32).reshape(-1, self.length)

    def save_pretrained(self, folder: Path) -> None:
        """Writes the tokenizer's folder."""
        self.tokenizer.save_pretrained(folder)


def load_clip_tokenizer(folder: Path, *, max_length: int, vocab_size: int) -> ClipTokenizer:
    """Reads a tokenizer's folder.

    Args:
      folder: With vocab.json and merges.txt, or with tokenizer.json.
      max_length: Positions that the text encoder has; rows are shorter where the tokenizer says so.
      vocab_size: Entries of the text encoder's table.
    Raises:
      FileNotFoundError: If the folder holds no tokenizer.
      ValueError: If it is damaged, or does not belong to the text encoder.
    """
    if not (folder / "tokenizer.json").is_file() and not (folder / "vocab.json").is_file():
        raise FileNotFoundError(
            f"{folder} holds no tokenizer: it has neither tokenizer.json nor vocab.json with merges.txt."
        )
    # Only here: importing jrl does not import transformers.
    from transformers import CLIPTokenizer

    try:
        tokenizer = CLIPTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # tokenizers raises bare ones
        reason = " ".join(str(error).split())
        raise ValueError(f"{folder} is refused by transformers: {type(error).__name__}: {reason}") from error
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= vocab_size:
        raise ValueError(
            f"{folder}: ids must be below {vocab_size}, the entries of the text encoder's table, got {largest}. Does "
            "the tokenizer belong to it?"
        )
    return ClipTokenizer(tokenizer, min(int(tokenizer.model_max_length), max_length))
