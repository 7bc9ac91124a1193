# SPDX-License-Identifier: Apache-2.0
"""The seam in a row's tokens, where the prompt ends and its completion begins.

The sampler reads a prompt that is tokenised by itself, so that is how prompts are tokenised for training too. Its
completion is what follows these ids in the tokens of prompt and completion together, as long as they begin the whole.
Where a token spans the seam ("th" of "t" + "he") they do not, and the completion is tokenised by itself: no sampler
could have written that token. Cutting the joint tokens at the prompt's length instead would lose characters, or hand
the completion a part of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jrl.data.tokenizer import tokenize

ANCHOR = "\n"
"""Stands before a text that goes on from another one: some tokenizers put a space before whatever comes first."""


class Split(NamedTuple):
    """A text in two parts, without special tokens.

    Attributes:
      prompt: Ids of the prompt by itself.
      completion: Ids of what follows it.
      spanned: Whether a token would span the seam.
    """

    prompt: list[int]
    completion: list[int]
    spanned: bool


def tokenize_split(tokenizer: Any, prompts: Sequence[str], completions: Sequence[str]) -> list[Split]:
    """Ids of each prompt and of the completion that goes on from it.

    Args:
      tokenizer: A transformers tokenizer.
      prompts: Texts, perhaps empty.
      completions: As many texts.
    """
    alone = tokenize(tokenizer, list(prompts))
    wholes = tokenize(tokenizer, [a + b for a, b in zip(prompts, completions, strict=True)])
    spans = [
        bool(text) and (whole[: len(prompt)] != prompt or len(whole) == len(prompt))
        for prompt, whole, text in zip(alone, wholes, completions, strict=True)
    ]
    continued = iter(
        continuations(tokenizer, [text for text, span in zip(completions, spans, strict=True) if span])
    )
    return [
        Split(prompt, next(continued) if span else whole[len(prompt) :], span)
        for prompt, whole, span in zip(alone, wholes, spans, strict=True)
    ]


def continuations(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Ids of texts that go on from another one, without the space that some tokenizers put before a first word."""
    anchor, *anchored = tokenize(tokenizer, [ANCHOR, *(ANCHOR + text for text in texts)])
    bare = tokenize(tokenizer, list(texts))
    return [
        ids[len(anchor) :] if ids[: len(anchor)] == anchor and len(ids) > len(anchor) else plain
        for ids, plain in zip(anchored, bare, strict=True)
    ]
