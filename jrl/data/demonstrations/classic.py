# SPDX-License-Identifier: Apache-2.0
"""Classic TRL's choice of the learned tokens: by templates that are searched for in the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jrl.data.tokenizer import tokenize


def template_ids(tokenizer: Any, template: str | Sequence[int]) -> list[int]:
    """Ids of a template: those of its text by itself, without special tokens; ids stay as they are.

    Many tokenizers write a text differently at the start of a line than inside one. Then the template is not found in
    the rows, and its ids as they stand there must be given.

    Raises:
      ValueError: If it has no tokens.
    """
    ids = (
        tokenize(tokenizer, [template])[0]
        if isinstance(template, str)
        else [int(token) for token in template]
    )
    if not ids:
        raise ValueError(f"the template must have at least one token, got {template!r}.")
    return ids


def completion_mask(
    tokens: Sequence[int], response: Sequence[int], instruction: Sequence[int] | None = None
) -> list[bool]:
    """True on the tokens that a model is to write.

    Without an `instruction` these are the tokens behind the last `response` template. With one, the i-th instruction
    template begins a stretch that is not learned and the i-th response template ends it; the first stretch begins with
    the row, and an instruction without a response is not learned either.

    Args:
      tokens: One row.
      response: Ids that stand before what is learned.
      instruction: Ids that stand before what is not.
    Returns:
      One flag a token; all False where a template is missing: the caller should say so.
    Example:
      >>> completion_mask([7, 1, 8, 2, 9], response=[2], instruction=[1])
      [False, False, False, False, True]
    """
    ends = [start + len(response) for start in places(tokens, response)]
    if not ends:
        return [False] * len(tokens)
    if instruction is None:
        return [position >= ends[-1] for position in range(len(tokens))]
    starts = places(tokens, instruction)
    if not starts:
        return [False] * len(tokens)
    if starts[0] > ends[0]:
        # The row begins with an answer's template: what stands before it is its instruction.
        starts = [0, *starts]
    learned = [True] * len(tokens)
    for number, (start, end) in enumerate(zip(starts, ends, strict=False)):
        first = start if number else 0
        learned[first:end] = [False] * max(end - first, 0)
    if len(ends) < len(starts):
        learned[starts[-1] :] = [False] * (len(tokens) - starts[-1])
    return learned


def places(tokens: Sequence[int], template: Sequence[int]) -> list[int]:
    """Columns at which a template begins, in order."""
    size, wanted = len(template), list(template)
    return [start for start in range(len(tokens) - size + 1) if list(tokens[start : start + size]) == wanted]
