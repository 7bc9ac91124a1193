# SPDX-License-Identifier: Apache-2.0
"""A tokenizer of the maze's sentences: what ends with a comma, a full stop or a line break is a token.

A position is two tokens, an observation at most eight, an action one.
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from ..worlds.tokenizer import piece_tokenizer
from .maze import CELLS, FAILURE, MOVES, SUCCESS, describe


def clause_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of both mazes."""
    texts = [SUCCESS, FAILURE, *(f"{action}\n" for action in MOVES)]
    texts += [describe(cell, shows_position=shows) for cell in CELLS for shows in (True, False)]
    return piece_tokenizer(r"[^.,\n]*[.,\n]", texts)
