# SPDX-License-Identifier: Apache-2.0
"""Preference records: which columns say what."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jrl.data.chat.messages import check_messages, is_dialogue

Text = str | list[dict[str, Any]]
"""A text, or the messages of a dialogue."""
ASSISTANT = "assistant"


class Preference(NamedTuple):
    """A checked record of preferences.

    Attributes:
      prompt: Of both; None: the texts that follow hold it themselves.
      chosen: The preferred text.
      rejected: The other one, of the same kind. Either may be empty.
      margin: By how much the preferred score should exceed the other one; 0 where nothing is said.
      tools: Schemas of functions, for the chat template.
      template_kwargs: More variables of the chat template.
    """

    prompt: Text | None
    chosen: Text
    rejected: Text
    margin: float = 0.0
    tools: Any = None
    template_kwargs: Any = None


def check_preferences(records: Sequence[Any]) -> list[Preference]:
    """The records' columns, checked one by one and against each other.

    Args:
      records: Mappings as `check_preference` takes them. They are not changed.
    Raises:
      ValueError: If there are none, one is malformed, or prompts are written twice; the message names the row and the
        columns it has.
    """
    check_rows(records)
    found = [check_preference(record, row=row) for row, record in enumerate(records)]
    _check_repeated_prompts(found)
    return found


def check_rows(records: Any) -> None:
    """Refuses what is no list of at least one record."""
    if isinstance(records, str | Mapping) or not isinstance(records, Sequence):
        raise ValueError(
            f"`samples` must be a list of rows with the columns 'chosen' and 'rejected', got {type(records).__name__}."
        )
    if not records:
        raise ValueError("`samples` must hold at least one row, got none.")


def check_preference(record: Any, *, row: int) -> Preference:
    """Checks a record and returns its contents.

    Args:
      record: `chosen` and `rejected`, both texts or both messages with role and content. With a `prompt` they go on
        from it; without, what both begin with is the prompt. Messages may repeat the prompt's. `margin`, `tools` and
        `chat_template_kwargs` may stand beside them; other columns are not read.
      row: Number of the record, for errors.
    Raises:
      ValueError: If a column is missing or of the wrong type.
    """
    if not isinstance(record, Mapping):
        raise ValueError(
            f"`samples`: row {row} must be a mapping with the columns 'chosen' and 'rejected', got "
            f"{type(record).__name__}."
        )
    columns = sorted(map(str, record))
    for column in ("chosen", "rejected"):
        if column not in record:
            raise ValueError(
                f"`samples`: row {row} needs the column {column!r}, it has {columns}. Rename yours to it, or add it: a "
                'row is such as {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}.'
            )
    prompt, chosen, rejected = record.get("prompt"), record["chosen"], record["rejected"]
    kinds = {name: _kind(value) for name, value in (("chosen", chosen), ("rejected", rejected))}
    if prompt is not None:
        kinds["prompt"] = _kind(prompt)
    for column, kind in kinds.items():
        if not kind:
            value = record[column]
            raise ValueError(
                f"`samples`: `{column}` of row {row} must be a text or a list of messages with `role` and `content`, "
                f"got {type(value).__name__} {str(value)[:60]!r}; columns: {columns}."
            )
    if len(set(kinds.values())) > 1:
        raise ValueError(
            f"`samples`: row {row} mixes texts and messages ({kinds}); where messages begin with the prompt, leave the "
            "column `prompt` out."
        )
    if kinds["chosen"] == "messages":
        prompt, chosen, rejected = _check_dialogues(prompt, chosen, rejected, row)
    template_kwargs = record.get("chat_template_kwargs")
    return Preference(
        prompt, chosen, rejected, read_margin(record, row), _tools(record, row), template_kwargs
    )


def _check_dialogues(prompt: Any, chosen: Any, rejected: Any, row: int) -> tuple[Any, Any, Any]:
    """Prompt and completions of messages, which may or may not repeat the prompt's."""
    chosen, rejected = (check_messages(side, row=row) if side else [] for side in (chosen, rejected))
    if prompt is None:
        length = common_beginning(chosen[:-1], rejected[:-1])
        while length and chosen[length - 1]["role"] == ASSISTANT:
            length -= 1
        return chosen[:length], chosen[length:], rejected[length:]
    prompt = check_messages(prompt, row=row)
    parts = []
    for column, messages in (("chosen", chosen), ("rejected", rejected)):
        repeats = messages[: len(prompt)] == prompt
        if messages and not repeats and messages[0]["role"] != ASSISTANT:
            raise ValueError(
                f"`samples`: `prompt` of row {row} is not the beginning of `{column}`, which begins with a message of "
                f"the {messages[0]['role']}; completions begin with the assistant's."
            )
        parts.append(messages[len(prompt) :] if repeats else messages)
    return prompt, parts[0], parts[1]


def _check_repeated_prompts(pairs: Sequence[Preference]) -> None:
    """Refuses texts that begin with their prompts, which would be learned as a part of the completion."""
    texts = {
        row: all(str(text).startswith(pair.prompt) for text in (pair.chosen, pair.rejected))
        for row, pair in enumerate(pairs)
        if pair.prompt and isinstance(pair.prompt, str)
    }
    repeating = sum(texts.values())
    # A completion may begin like its prompt by chance; most of them do not.
    if len(pairs) < 3 or 2 * repeating <= len(texts):
        return
    if repeating < len(texts):
        row = next(row for row, repeats in texts.items() if not repeats)
        raise ValueError(
            f"`samples`: `prompt` of row {row} is not the beginning of `chosen` and `rejected`, though it is in "
            f"{repeating} of {len(texts)} rows: are completions given with their prompts or without?"
        )
    raise ValueError(
        f"`samples`: `chosen` and `rejected` of all {len(texts)} rows begin with their `prompt`, which would then be "
        "there twice: leave the column `prompt` out, or give completions without it."
    )


def _kind(value: Any) -> str:
    if isinstance(value, str):
        return "text"
    return "messages" if is_dialogue(value) or (isinstance(value, list) and not value) else ""


def read_margin(record: Mapping[str, Any], row: int) -> float:
    """The number in the column `margin`, which must be finite; 0 where there is none.

    Args:
      record: Of any columns.
      row: Number of the record, for the error.
    """
    value = record.get("margin")
    if value is None:
        return 0.0
    try:
        margin = float(value)
    except (TypeError, ValueError):
        margin = math.nan
    if not math.isfinite(margin):
        raise ValueError(
            f"`samples`: `margin` of row {row} must be a finite number, got {value!r}; columns: "
            f"{sorted(map(str, record))}."
        )
    return margin


def _tools(record: Mapping[str, Any], row: int) -> Any:
    """Schemas of functions. Tables have no column for so many shapes: there they are spelled as JSON."""
    tools = record.get("tools")
    if not isinstance(tools, str):
        return tools
    try:
        return json.loads(tools)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"`samples`: `tools` of row {row} must be schemas or their JSON: {error}."
        ) from error


def common_beginning(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Number of entries that both sequences begin with.

    Example:
      >>> common_beginning([1, 2, 3], [1, 2, 4, 3])
      2
    """
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))
