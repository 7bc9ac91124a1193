# SPDX-License-Identifier: Apache-2.0
"""Prompts of a chat as the texts that `jrl.train` takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jrl.data.chat.messages import check_messages, is_dialogue
from jrl.data.chat.rendering import Chat


def as_messages(row: Mapping[str, Any], number: int) -> list[dict[str, Any]]:
    """Messages of a row's prompt; a text is the user's.

    Args:
      row: With `prompt`.
      number: Of the row, for errors.
    Raises:
      ValueError: If there is no prompt, a message is malformed, or the last one is no text for the policy to answer.
    """
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not is_dialogue(prompt):
        raise ValueError(f"`rows[{number}]` must have a `prompt`, messages or a text, got {prompt!r:.80}.")
    messages = check_messages(prompt, row=number)
    if messages[-1]["role"] == "assistant" or not isinstance(messages[-1]["content"], str):
        raise ValueError(
            f"`rows[{number}]`: the last message of the prompt must be a text that an assistant answers, got "
            f"{messages[-1]!r:.120}."
        )
    return messages


def prompt_text(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    template_kwargs: Mapping[str, Any] | None = None,
    row: int | None = None,
) -> str:
    """The text of a dialogue that an assistant is to continue, up to the end of the generation prefix.

    Args:
      tokenizer: With a chat template.
      messages: At least one.
      tools: JSON schemas of functions, which the template writes.
      template_kwargs: More variables of the template.
      row: Number of the record, for errors.
    Raises:
      ValueError: If there is no template, or it refuses the messages.
    """
    chat = Chat(tokenizer, row, list(tools) or None, template_kwargs or {})
    return chat.render([dict(message) for message in messages], generation=True)
