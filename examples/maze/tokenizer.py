# SPDX-License-Identifier: Apache-2.0
"""A tokenizer of the maze's sentences, made on the spot: what ends with a comma or a full stop is a token, and so is a
line break. A position is two tokens, an observation at most eight, an action two."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from .maze import CELLS, FAILURE, MOVES, SUCCESS, describe

_CLAUSE = Regex(r"[^.,\n]*[.,\n]")


def clause_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer without merges: a text has the same tokens wherever it stands. EOS pads and is never written."""
    split = pre_tokenizers.Split(_CLAUSE, behavior="isolated")
    texts = [SUCCESS, FAILURE, *(f"{action}\n" for action in MOVES)]
    texts += [describe(cell, shows_position=shows) for cell in CELLS for shows in (True, False)]
    clauses = sorted({clause for text in texts for clause, _ in split.pre_tokenize_str(text)})
    vocabulary = {clause: i for i, clause in enumerate(["<eos>", "<unk>", *clauses])}
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
