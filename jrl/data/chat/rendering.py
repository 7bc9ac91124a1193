# SPDX-License-Identifier: Apache-2.0
"""A chat template at work: text, ids, and which of them an assistant wrote."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jrl.data.chat.messages import in_row
from jrl.data.chat.template_limits import bounded_rendering, check_size, check_template
from jrl.data.tokenizer import tokenize, without_surrogates

OTHER_TEMPLATE = (
    "set `tokenizer.tokenizer_path` to the tokenizer of a chat model that has such a template (with `jrl.trl`, "
    "`chat_template_path` takes a .jinja file, too)"
)
"""How a user gives another chat template, for errors."""
_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TURN = "jrl-turn-of-the-assistant"
"""Stands for the turn that a reply follows: no template writes it by itself."""


def marks_assistants(tokenizer: Any, *, row: int | None = None) -> bool:
    """True where the template itself marks an assistant's tokens, by `{% generation %}`.

    Args:
      tokenizer: A transformers tokenizer.
      row: Number of the record, for the error.
    Raises:
      ValueError: If it has no chat template, or one that raises to powers.
    """
    template = tokenizer.chat_template
    if isinstance(template, Mapping):
        template = template.get("default")
    if not template:
        raise ValueError(
            f"`messages`{in_row(row)} need a chat template, and the tokenizer has none: {OTHER_TEMPLATE}, or give "
            "texts instead of messages."
        )
    check_template(template)
    return _MARKER.search(template) is not None


def end_of_turn(ids: list[int], start: int, tokenizer: Any) -> int:
    """Index behind the last special token of `ids[start:]`, if only white space follows it; else the end.

    Args:
      ids: Of a rendered dialogue.
      start: Where the turn begins.
      tokenizer: That wrote them.
    """
    special = set(tokenizer.all_special_ids)
    last = next((i for i in range(len(ids) - 1, start - 1, -1) if ids[i] in special), None)
    if last is None or tokenizer.decode(ids[last + 1 :]).strip():
        return len(ids)
    return last + 1


class Chat(NamedTuple):
    """The template with everything that it reads beside the messages.

    Attributes:
      tokenizer: With a chat template.
      row: Number of the record, for errors.
      tools: JSON schemas of functions.
      variables: More variables of the template.
    """

    tokenizer: Any
    row: int | None
    tools: Any
    variables: Mapping[str, Any]

    def render(self, messages: list[dict[str, Any]], *, generation: bool) -> str:
        """The text of messages, with the generation prefix if asked.

        Raises:
          ValueError: If there is no template, or it refuses the messages.
        """
        from jinja2 import TemplateError

        marks_assistants(self.tokenizer, row=self.row)  # refuses a tokenizer without a template
        options: dict[str, Any] = {
            **self.variables,
            "tokenize": False,
            "add_generation_prompt": generation,
        }
        try:
            with bounded_rendering():
                text = self.tokenizer.apply_chat_template(messages, tools=self.tools, **options)
        except (TemplateError, TypeError) as error:
            raise ValueError(f"The chat template refuses `messages`{in_row(self.row)}: {error}") from error
        return check_size(str(text))

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids without further special tokens: the template has written those that belong there."""
        found = tokenize(self.tokenizer, texts)
        for ids in found:
            _check_bos(ids, self.tokenizer, self.row)
        return found

    def compared(self, messages: list[dict[str, Any]]) -> tuple[list[int], list[bool]]:
        """Ids and mask from what the template writes before and after each assistant message."""
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if turns and turns[0] == 0:
            raise ValueError(
                f"`messages`{in_row(self.row)} begin with an assistant's message, of which only a template with "
                f"`{{% generation %}}` markers can tell what the assistant wrote: {OTHER_TEMPLATE}."
            )
        texts = [self.render(messages, generation=False)]
        for number in turns:
            texts.append(self.render(messages[:number], generation=True))
            texts.append(self.render(messages[: number + 1], generation=False))
        ids, *beginnings = self.encode(texts)
        mask = [False] * len(ids)
        for number, prompt, turn in zip(turns, beginnings[0::2], beginnings[1::2], strict=True):
            what = f"up to message {number}"
            check_beginning(prompt, ids, self.row, what)
            # A template may end the whole text with a token that a further turn would not follow.
            end = _common(turn, ids)
            if self.tokenizer.decode(turn[end:], skip_special_tokens=True).strip():
                found = self.end_before_others(messages, number, ids)
                if found is None:
                    check_beginning(turn, ids, self.row, what)
                end = found or end
            stop = end_of_turn(ids[:end], len(prompt), self.tokenizer)
            mask[len(prompt) : stop] = [True] * (stop - len(prompt))
        return ids, mask

    def end_before_others(self, messages: list[dict[str, Any]], number: int, ids: list[int]) -> int | None:
        """End of the turn of message `number`, for a template that writes the last turn of all otherwise.

        What the messages up to the next assistant's add is seen where this turn is left out; the dialogue up to there
        must end with just that. None where it does not, or the template refuses messages without the turn.
        """
        later = range(number + 1, len(messages))
        following = next((i for i in later if messages[i]["role"] == "assistant"), len(messages))
        others = messages[number + 1 : following]
        try:
            texts = [
                self.render(part, generation=False)
                for part in (messages[:number], messages[:number] + others, messages[:following])
            ]
        except ValueError:
            return None
        before, without, whole = self.encode(texts)
        added = without[len(before) :]
        fits = without[: len(before)] == before and ids[: len(whole)] == whole
        if not added or not fits or whole[-len(added) :] != added:
            return None
        return len(whole) - len(added)

    def marked(self, messages: list[dict[str, Any]]) -> tuple[list[int], list[bool]]:
        """Ids and mask of a template with markers.

        From the characters of every token, not through transformers' own mask: that learns the rest of a dialogue where
        a marked span ends with a character that the tokenizer drops.
        """
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        if not self.tokenizer.is_fast:
            raise ValueError(
                "`tokenizer` must be a fast one where the chat template marks assistants: only those tell which "
                "characters a token stands for."
            )
        variables = {**self.tokenizer.special_tokens_map, **self.variables}
        kept = [{name: value for name, value in message.items() if value is not None} for message in messages]
        try:
            with bounded_rendering():
                rendered: Any = render_jinja_template(
                    conversations=[kept],
                    tools=self.tools,
                    chat_template=self.tokenizer.get_chat_template(None, self.tools),
                    return_assistant_tokens_mask=True,
                    **variables,
                )
        except (TemplateError, TypeError) as error:
            raise ValueError(f"The chat template refuses `messages`{in_row(self.row)}: {error}") from error
        (text,), (spans,) = rendered
        seen = without_surrogates(check_size(text))
        if len(seen) < len(text):  # spans count the characters that the tokenizer sees
            spans = [tuple(len(without_surrogates(text[:place])) for place in span) for span in spans]
        encoded = self.tokenizer(
            seen,
            add_special_tokens=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        ids = list(encoded["input_ids"])
        _check_bos(ids, self.tokenizer, self.row)
        mask = [
            any(first < stop and last > start for start, stop in spans)
            for first, last in encoded["offset_mapping"]
        ]
        return ids, mask


def _check_bos(ids: list[int], tokenizer: Any, row: int | None) -> None:
    if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
        raise ValueError(
            f"The chat template begins `messages`{in_row(row)} with BOS twice: does the first message begin with it?"
        )


def check_beginning(part: list[int], ids: list[int], row: int | None, what: str) -> None:
    """Refuses a part of a dialogue, called `what`, whose ids do not begin those of the whole."""
    at = _common(part, ids)
    if at < len(part):
        raise ValueError(
            f"The ids {what}{in_row(row)} are not the beginning of the whole dialogue's (they part at token {at}), so "
            "training would not see what sampling starts from: the chat template changes earlier text once more "
            f"follows. Split the dialogue so that only its last turn is learned, or {OTHER_TEMPLATE}."
        )


def _common(part: list[int], ids: list[int]) -> int:
    """Length of the beginning that both share."""
    unequal = (i for i, (a, b) in enumerate(zip(part, ids, strict=False)) if a != b)
    return next(unequal, min(len(part), len(ids)))


def reply_text(
    tokenizer: Any,
    content: str | Sequence[Mapping[str, Any]],
    role: str = "tool",
    *,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """All that stands between an assistant's turn and its next one, where other messages come between them.

    It begins with the template's end of the turn, which a model may have sampled already.

    Args:
      tokenizer: With a chat template.
      content: Of the message; or several messages as they are.
      role: Of the message, such as "user" or "tool".
      template_kwargs: More variables of the template.
    Raises:
      ValueError: If there is no template, it refuses the messages, or drops an assistant's turn.
    """
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": _TURN},
        *([{"role": role, "content": content}] if isinstance(content, str) else map(dict, content)),
    ]
    text = Chat(tokenizer, None, None, template_kwargs or {}).render(messages, generation=True)
    before, found, after = text.partition(_TURN)
    if not found:
        raise ValueError(
            "The chat template must write the turn of an assistant as it is, and leaves it out: with it no environment "
            f"can answer. It wrote {before!r:.200}."
        )
    return after


def check_role(tokenizer: Any, role: str) -> None:
    """Refuses a role whose messages the chat template leaves out.

    Args:
      tokenizer: With a chat template.
      role: Of messages between an assistant's turns.
    Raises:
      ValueError: If it does, or there is no template, or it refuses the role.
    """
    content = "jrl-observation"
    if content not in reply_text(tokenizer, content, role):
        raise ValueError(
            f"The chat template leaves out messages of the role {role!r}, so a policy would not read what its "
            'environment says. Take another role, such as "user".'
        )
