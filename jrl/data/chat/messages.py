# SPDX-License-Identifier: Apache-2.0
"""Role/content messages: what a dialogue must look like before any template sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
SHARED_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}
"""Names that ShareGPT's files give to roles, beside those that everybody uses."""


def is_dialogue(value: Any) -> bool:
    """True where a column's value is a list of messages, rather than a text."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and len(value) > 0
        and all(isinstance(message, Mapping) for message in value)
    )


def is_empty(value: Any) -> bool:
    """True where a completion, a text or messages, is empty."""
    if not value or isinstance(value, str):
        return not value
    last = value[-1]
    return last.get("content", last.get("value", "")) == "" and not last.get("tool_calls")


def check_messages(messages: Any, *, row: int | None = None) -> list[dict[str, Any]]:
    """Messages with `role` and `content`, converted from ShareGPT's `from` and `value` where they have those.

    Args:
      messages: At least one. What else a message holds (tool calls, names) stays.
      row: Number of the record, for the error.
    Raises:
      ValueError: If something is missing, of the wrong type, or a role is unknown.
    """
    where = in_row(row)
    if not is_dialogue(messages):
        raise ValueError(
            f"`messages`{where} must be a list of at least one message (a mapping with `role` and `content`), "
            f"got {shortened(messages)}."
        )
    return [_check_message(message, number, where) for number, message in enumerate(messages)]


def in_row(row: int | None) -> str:
    """` of row N`, for errors; nothing where the row is not known."""
    return "" if row is None else f" of row {row}"


def shortened(value: Any) -> str:
    """A value as an error shows it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check_message(message: Message, number: int, where: str) -> dict[str, Any]:
    if "from" in message and "value" in message and "role" not in message:
        kept = {name: value for name, value in message.items() if name not in ("from", "value")}
        role = message["from"]
        message = {"role": SHARED_ROLES.get(role, role), "content": message["value"], **kept}
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise ValueError(
            f"`messages`{where}: the `role` of message {number} must be one of {', '.join(ROLES)}, got {role!r}."
        )
    # What calls a tool may say nothing; a list holds the parts of a content.
    if not isinstance(content, str | list | tuple) and not (content is None and message.get("tool_calls")):
        raise ValueError(
            f"`messages`{where}: the `content` of message {number} must be a text, got {shortened(content)}."
        )
    return dict(message)
