# SPDX-License-Identifier: Apache-2.0
"""A tokenizer of letters, made on the spot: a letter and the white space behind it are a token, so a guess is five."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from ..worlds.tokenizer import piece_tokenizer
from .wordle import PROMPT, WORDS


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of guesses and their answers."""
    letters = sorted({letter for word in WORDS for letter in word})
    return piece_tokenizer(
        r"\S\s?|\s", [PROMPT, "\n", *(f"{letter}{space}" for letter in letters for space in " \n")]
    )
