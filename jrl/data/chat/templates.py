# SPDX-License-Identifier: Apache-2.0
"""Dialogues of role/content messages through the tokenizer's own chat template: the one way to ids there is.

Prompts for sampling and whole dialogues for training are rendered by the same template, and the ids of a prompt with
its generation prefix must begin the ids of the full turn: what training calls the prompt is what sampling starts from.

Which tokens an assistant wrote comes from the template where it marks them with `{% generation %}`. Other templates
are asked what they write before and after each assistant message, and what lies between is the assistant's. That
needs no second version of anybody's template, and is sound where every such beginning begins the whole dialogue; a row
where it does not is refused.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jrl.data.chat.messages import Message, check_messages, in_row
from jrl.data.chat.rendering import Chat, check_beginning, marks_assistants


def with_chat_template(tokenizer: Any, path: str | os.PathLike[str]) -> Any:
    """A copy of the tokenizer with another chat template.

    Args:
      tokenizer: A transformers tokenizer; left untouched.
      path: A file .jinja, .jinja2 or .j2, or a tokenizer (folder, or name on the hub) whose template is taken.
    Raises:
      ValueError: If there is no template.
    """
    if Path(path).suffix in (".jinja", ".jinja2", ".j2"):
        if not Path(path).is_file():
            raise ValueError(
                f"`chat_template_path` must be a file or a tokenizer, got {path!s}: no such file."
            )
        template = Path(path).read_text(encoding="utf-8")
    else:
        from transformers import AutoTokenizer  # here, because it takes seconds where torch is installed

        try:
            template = AutoTokenizer.from_pretrained(os.fspath(path), trust_remote_code=False).chat_template
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(
                f"`chat_template_path`: nothing could be read from {path!s}: {reason}"
            ) from error
        if not template:
            raise ValueError(f"`chat_template_path`: the tokenizer {path!s} has no chat template of its own.")
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed


def render_prompt(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    row: int | None = None,
    tools: Any = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Ids of a dialogue that an assistant is to continue, up to the end of the generation prefix.

    Args:
      tokenizer: With a chat template.
      messages: At least one; the last is not an assistant's.
      row: Number of the record, for errors.
      tools: JSON schemas of functions, for templates that write them.
      template_kwargs: More variables of the template (`enable_thinking`, ...).
    Raises:
      ValueError: If a message is malformed, there is no template, it refuses the messages, or begins with two BOS.
    """
    found = check_messages(messages, row=row)
    if found[-1]["role"] == "assistant":
        raise ValueError(
            f"`prompt`{in_row(row)} must not end with an assistant's message: nothing is left to answer. Does that "
            "message belong to the completion?"
        )
    chat = Chat(tokenizer, row, tools, template_kwargs or {})
    return chat.encode([chat.render(found, generation=True)])[0]


def render_dialogue(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    row: int | None = None,
    tools: Any = None,
    template_kwargs: Mapping[str, Any] | None = None,
    with_mask: bool = True,
) -> tuple[list[int], list[bool] | None]:
    """Ids of a whole dialogue, and which of them an assistant wrote.

    Without markers in the template, an assistant's tokens are those that its message adds to the rendered prompt, up to
    the last special token: a line break that the template writes after the end of a turn is no sampler's.

    Args:
      tokenizer: With a chat template.
      messages: At least one.
      row: Number of the record, for errors.
      tools: As in `render_prompt`.
      template_kwargs: As in `render_prompt`.
      with_mask: Whether to find out what assistants wrote.
    Returns:
      Ids, and one flag an id; None without `with_mask`.
    Raises:
      ValueError: As `render_prompt`; with a mask, also if what comes before an assistant's message is rendered
        differently once the message is there.
    """
    found = check_messages(messages, row=row)
    chat = Chat(tokenizer, row, tools, template_kwargs or {})
    if not with_mask:
        return chat.encode([chat.render(found, generation=False)])[0], None
    return chat.marked(found) if marks_assistants(tokenizer, row=row) else chat.compared(found)


def render_answer(
    tokenizer: Any,
    prompt: Sequence[Message],
    completion: Sequence[Message],
    *,
    row: int | None = None,
    tools: Any = None,
    template_kwargs: Mapping[str, Any] | None = None,
    with_mask: bool = False,
) -> tuple[list[int], int, list[bool] | None]:
    """Ids of prompt and completion, how many of them are the prompt's, and the assistants' mask.

    Args:
      tokenizer: With a chat template.
      prompt: As in `render_prompt`; its ids, generation prefix included, begin the result.
      completion: The messages that follow.
      row: Number of the record, for errors.
      tools: As in `render_prompt`.
      template_kwargs: As in `render_prompt`.
      with_mask: As in `render_dialogue`.
    Raises:
      ValueError: As the other two; also if the template writes the prompt differently once it is answered.
    """
    options: dict[str, Any] = {"row": row, "tools": tools, "template_kwargs": template_kwargs}
    start = render_prompt(tokenizer, prompt, **options)
    messages = [*check_messages(prompt, row=row), *check_messages(completion, row=row)]
    ids, mask = render_dialogue(tokenizer, messages, with_mask=with_mask, **options)
    check_beginning(start, ids, row, "of the prompt and the generation prefix")
    return ids, len(start), mask
