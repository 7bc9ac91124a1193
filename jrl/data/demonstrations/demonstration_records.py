# SPDX-License-Identifier: Apache-2.0
"""Records of demonstrations, checked: a text, messages, a prompt with its completion, or ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jrl.data.chat.messages import check_messages, is_dialogue, is_empty

DIALOGUE_COLUMNS = ("messages", "conversations", "conversation")
TOKEN_MASKS = ("completion_mask", "assistant_masks")
PADDING_MASK = "attention_mask"
IGNORED_LABEL = -100

Text = str | list[dict[str, Any]]
"""A text, or the messages of a dialogue."""


class Demonstration(NamedTuple):
    """A checked record of demonstrations.

    Attributes:
      prompt: What is answered; None: the record is one text, or one dialogue.
      text: That, or the completion, of the prompt's kind.
      tools: Schemas of functions, for the chat template.
      template_kwargs: More variables of the chat template.
      tokens: Ids, where the record brings them; the other fields are then empty.
      learned: One flag for each of those.
    """

    prompt: Text | None
    text: Text
    tools: Any = None
    template_kwargs: Any = None
    tokens: list[int] | None = None
    learned: list[bool] | None = None


def check_demonstration(
    record: Any, row: int, *, text_field: str, formatting_fn: Callable[[Mapping[str, Any]], str] | None = None
) -> Demonstration:
    """Checks a record and returns its contents.

    The first of these that it has decides: `input_ids` (with `labels`, or masks `completion_mask` and
    `assistant_masks`; `attention_mask` tells padding, which is left out), a dialogue in `messages`, `conversations` or
    `conversation`, `prompt` and `completion`, the text column.

    Args:
      record: A mapping from columns to values, or a text.
      row: Its number, for errors.
      text_field: The column of texts.
      formatting_fn: The text of a record, whatever its columns; None: columns as above.
    Raises:
      ValueError: If it holds nothing to learn from, or a column has the wrong type.
    """
    if formatting_fn is not None:
        try:
            text = formatting_fn(record)
        except (KeyError, IndexError, TypeError) as error:
            columns = sorted(map(str, record)) if isinstance(record, Mapping) else type(record).__name__
            raise ValueError(
                f"`formatting_fn` failed on row {row} with {type(error).__name__}: {error}; columns: {columns}."
            ) from error
        if not isinstance(text, str):
            raise ValueError(
                f"`formatting_fn` must return a text, got {type(text).__name__} for row {row}: it is called with one "
                "record at a time."
            )
        return Demonstration(None, _text(text, "formatting_fn", row, []))
    record = {text_field: record} if isinstance(record, str) else record
    if not isinstance(record, Mapping):
        raise ValueError(
            f"`samples`: row {row} must be a mapping from columns to values, or a text, got {type(record).__name__}."
        )
    columns = sorted(map(str, record))
    if record.get("input_ids") is not None:
        return _tokenised(record, row)
    options = record.get("tools"), record.get("chat_template_kwargs")
    dialogue = next((name for name in DIALOGUE_COLUMNS if record.get(name) is not None), None)
    if dialogue is not None:
        return Demonstration(None, check_messages(record[dialogue], row=row), *options)
    if record.get("prompt") is not None and record.get("completion") is not None:
        return Demonstration(*_pair(record["prompt"], record["completion"], row, columns), *options)
    if record.get(text_field) is not None:
        return Demonstration(None, _text(record[text_field], text_field, row, columns))
    raise ValueError(
        f"`samples`: row {row} needs the column {text_field!r}, 'messages', or 'prompt' and 'completion'; it has "
        f"{columns}."
    )


def _pair(prompt: Any, completion: Any, row: int, columns: list[str]) -> tuple[Text, Text]:
    both_texts = isinstance(prompt, str) and isinstance(completion, str)
    both_dialogues = is_dialogue(prompt) and is_dialogue(completion)
    if (both_texts or both_dialogues) and is_empty(completion):
        raise ValueError(f"`samples`: `completion` of row {row} is empty; columns: {columns}.")
    if both_texts:
        return prompt, completion
    if both_dialogues:
        return check_messages(prompt, row=row), check_messages(completion, row=row)
    raise ValueError(
        f"`samples`: `prompt` and `completion` of row {row} must both be texts, or both messages with `role` and "
        f"`content`, got {type(prompt).__name__} and {type(completion).__name__}; columns: {columns}."
    )


def _text(value: Any, column: str, row: int, columns: list[str]) -> str:
    if not isinstance(value, str) or not value:
        found = "an empty text" if value == "" else type(value).__name__
        raise ValueError(
            f"`samples`: {column!r} of row {row} must be a text, got {found}; columns: {columns}."
        )
    return value


def _tokenised(record: Mapping[str, Any], row: int) -> Demonstration:
    """A record that brings its ids; what its `attention_mask` leaves out is padding."""
    tokens = list(record["input_ids"])
    learned = [True] * len(tokens)
    masks = {
        name: [bool(flag) for flag in record[name]]
        for name in (*TOKEN_MASKS, PADDING_MASK)
        if record.get(name) is not None
    }
    if record.get("labels") is not None:
        masks["labels"] = [label != IGNORED_LABEL for label in record["labels"]]
    for name, mask in masks.items():
        if len(mask) != len(tokens):
            raise ValueError(
                f"`samples`: `{name}` of row {row} must have one entry for each of {len(tokens)} `input_ids`, got "
                f"{len(mask)}."
            )
        learned = [flag and more for flag, more in zip(learned, mask, strict=True)]
    real = masks.get(PADDING_MASK, [True] * len(tokens))
    tokens, learned = (
        [value for value, keep in zip(row, real, strict=True) if keep] for row in (tokens, learned)
    )
    return Demonstration(None, "", tokens=tokens, learned=learned)
