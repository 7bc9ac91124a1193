# SPDX-License-Identifier: Apache-2.0
"""Demonstrations: texts, prompt-output pairs and dialogues as rows with a mask over what is learned from."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from jrl.data.demonstrations.rows import DialogueRow, RowSet, rows_with_targets
from jrl.data.tokenizer import begun, cut, prompt_prefix, tokenize


class DialogueSet(RowSet):
    """Tokenised samples and their batches.

    A sample begins with what the tokenizer puts before ordinary text, once, as a sampled prompt does: BOS of Llama and
    Gemma. A text is learned whole and ends with EOS. In `[prompt, output, prompt, output, ...]` only outputs are
    learned, EOS follows the last one, and BOS (EOS where there is none) stands before an output that comes first.
    Samples above `max_length` are cut on the tokenizer's `truncation_side` behind what they begin with; EOS is cut like
    any token, since a text without its end must not teach where to end.

    Args:
      samples: Texts, and lists of an even number of texts. They are not changed.
      tokenizer: With an EOS token.
      max_length: Most tokens of a sample, at least 2.
      seed: Of the order.
      add_special_tokens: False leaves out what stands before a sample, as trlX does.

    Samples that were cut are warned of once.

    Raises:
      ValueError: If there are no samples, or one is not a text or an even number of texts, or is an empty text; the
        message names its index.
    """

    def __init__(
        self,
        samples: Sequence[str | Sequence[str]],
        tokenizer: Any,
        *,
        max_length: int,
        seed: int,
        add_special_tokens: bool = True,
    ) -> None:
        prefix = prompt_prefix(tokenizer, add_special_tokens=add_special_tokens)
        if max_length < max(2, len(prefix) + 1):
            raise ValueError(
                f"`max_length` must be at least {max(2, len(prefix) + 1)} (a token and what follows it), got "
                f"{max_length}."
            )
        if tokenizer.eos_token_id is None:
            raise ValueError("`tokenizer` must have an EOS token: a model learns where a text ends from it.")
        messages = _messages(samples)
        # One call for all messages: fast tokenizers work on many texts at once.
        flat = iter(tokenize(tokenizer, [text for sample in messages for text in sample]))
        rows, num_truncated = [], 0
        for index, (sample, texts) in enumerate(zip(samples, messages, strict=True)):
            parts = [next(flat) for _ in texts]
            if isinstance(sample, str):
                if not parts[0]:
                    raise ValueError(f"`samples`: sample {index} ({sample!r}) has no tokens.")
                row, truncated = _text_row(parts[0], tokenizer, prefix, max_length)
            else:
                row, truncated = tokenize_dialogue(parts, tokenizer, max_length=max_length, prefix=prefix)
            num_truncated += truncated
            rows.append(row)
        kept = rows_with_targets(rows, max_length)
        super().__init__(
            [rows[index] for index in kept],
            pad_token_id=tokenizer.pad_token_id,
            max_length=max_length,
            seed=seed,
            kept=kept,
            num_truncated=num_truncated,
            num_dropped=len(rows) - len(kept),
        )
        if num_truncated:
            warnings.warn(
                f"{num_truncated} of {len(rows)} samples have more than {max_length} tokens and were cut on the "
                f"{tokenizer.truncation_side}; {self.num_dropped} lost all of their output by that and were dropped.",
                stacklevel=2,
            )


def tokenize_dialogue(
    messages: Sequence[list[int]], tokenizer: Any, *, max_length: int, prefix: Sequence[int] = ()
) -> tuple[DialogueRow, bool]:
    """Joins a dialogue's tokenised messages to a row.

    Args:
      messages: Prompt, output, prompt, output, ...: ids of each, without special tokens.
      tokenizer: For its EOS, its BOS and its truncation side.
      max_length: Most tokens of the row.
      prefix: Begins the row, unless the messages begin with it; never cut and not learned.
    Returns:
      The row, and whether it was cut.
    """
    tokens = [token for message in messages for token in message]
    learned = [index % 2 == 1 for index, message in enumerate(messages) for _ in message]
    if not messages[-1] or messages[-1][-1] != tokenizer.eos_token_id:
        tokens.append(tokenizer.eos_token_id)
        learned.append(True)
    first = list(prefix)
    if first and tokens[: len(first)] == first:
        tokens, learned = tokens[len(first) :], learned[len(first) :]
    room, side = max_length - len(first), tokenizer.truncation_side
    truncated = len(tokens) > room
    tokens, flags = cut(tokens, room, side), cut([int(flag) for flag in learned], room, side)
    if not first and flags[0]:
        # The model cannot write the first token of a row: it needs a state before it.
        truncated |= len(tokens) == max_length
        tokens, flags = cut(tokens, max_length - 1, side), cut(flags, max_length - 1, side)
        first = [tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id]
    return DialogueRow(first + tokens, [False] * len(first) + [bool(flag) for flag in flags]), truncated


def _text_row(ids: list[int], tokenizer: Any, prefix: list[int], max_length: int) -> tuple[DialogueRow, bool]:
    """A plain text: everything is learned but what stands before it, which is never cut."""
    ended = begun(prefix, ids if ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id])
    tokens = ended[len(prefix) :]
    kept = cut(tokens, max_length - len(prefix), tokenizer.truncation_side)
    return DialogueRow(prefix + kept, [False] * len(prefix) + [True] * len(kept)), len(kept) < len(tokens)


def _messages(samples: Sequence[str | Sequence[str]]) -> list[list[str]]:
    """The texts of each sample, checked."""
    if isinstance(samples, str):
        raise ValueError("`samples` must be a list of samples, got a single text: put it in a list.")
    if len(samples) == 0:
        raise ValueError("`samples` must hold at least one sample, got none.")
    found = []
    for index, sample in enumerate(samples):
        texts = [sample] if isinstance(sample, str) else sample
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            raise ValueError(
                f"`samples`: sample {index} must be a text or a list [prompt, output, ...] of texts, got {sample!r}."
            )
        if not isinstance(sample, str) and (len(texts) == 0 or len(texts) % 2):
            raise ValueError(
                f"`samples`: sample {index} must alternate prompts and outputs, so have an even number of messages, "
                f"got {len(texts)}."
            )
        found.append(list(texts))
    return found
