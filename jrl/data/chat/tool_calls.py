# SPDX-License-Identifier: Apache-2.0
"""Tool calls in a chat template's own format: what a model is told of its tools, and the calls that it wrote.

A tokenizer may say by its `response_template` how turns are read. Where it does not, the format is found by what the
template writes: the one that reads a call back from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jrl.data.chat.rendering import OTHER_TEMPLATE, Chat, reply_text

_PROBED = "jrl_probe"
_PROBE = {"name": _PROBED, "arguments": {"text": "a b", "number": 7}}
_ANSWERED = "jrl-answer"
_THOUGHTS = {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"}
_HERMES: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": _THOUGHTS,
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}
_LLAMA: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r'\{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*',
            "close_pattern": r"\}<\|eot_id\|>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"<\|eot_id\|>\s*", "content": "text"},
    },
}
FORMATS: Mapping[str, Mapping[str, Any]] = {"hermes": _HERMES, "llama": _LLAMA}
"""Formats that are known, as transformers' response templates: Hermes' (Qwen 2.5 and 3) and Llama 3's."""


class CallFormat(NamedTuple):
    """Reads the turns of a model.

    Attributes:
      tokenizer: With a chat template.
      template: A response template of transformers.
      schemas: JSON schemas of the tools, from which values of arguments get their types.
      prefix: Text that ends as a prompt does: the template may begin the turn itself.
    """

    tokenizer: Any
    template: Mapping[str, Any]
    schemas: Sequence[Mapping[str, Any]]
    prefix: str

    def read(self, ids: Sequence[int]) -> dict[str, Any]:
        """The message that a turn is: `content`, and `tool_calls` where it calls tools.

        What is not in the format is text as a whole, without calls: half a call, or JSON that is none.

        Args:
          ids: All that was sampled in the turn.
        """
        try:
            found = self.tokenizer.parse_response(
                list(ids), schema=dict(self.template), prefix=self.prefix, tools=list(self.schemas)
            )
            message = {**found, "content": _content(found, self.tokenizer)}
            if "tool_calls" in message:
                message["tool_calls"] = _checked(message["tool_calls"])
        except (ValueError, TypeError):
            content = self.tokenizer.decode(list(ids), skip_special_tokens=True)
            return {"role": "assistant", "content": content}
        return message


def _content(found: Mapping[str, Any], tokenizer: Any) -> str:
    content = found.get("content") or ""
    return content.removesuffix(tokenizer.eos_token or "") if isinstance(content, str) else content


def _checked(calls: Any) -> list[dict[str, Any]]:
    """Calls that have a name and arguments; a model may write others.

    Raises:
      ValueError: If one has no name, or the arguments are no mapping.
    """
    found = []
    for call in calls:
        function = dict(call["function"]) if isinstance(call.get("function"), Mapping) else {}
        arguments = {} if function.get("arguments") is None else function["arguments"]
        if not isinstance(function.get("name"), str) or not isinstance(arguments, Mapping):
            raise ValueError(f"a call must have a name and arguments, got {call!r:.80}")
        found.append({**call, "function": {**function, "arguments": dict(arguments)}})
    return found


def tool_schemas(functions: Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
    """JSON schemas of functions, from their docstrings and type hints.

    Args:
      functions: Each has a type hint and a line in the section `Args:` of its docstring for each argument.
    Raises:
      ValueError: If one is no function, lacks either, or two have the same name.
    """
    from transformers.utils import get_json_schema

    found: list[dict[str, Any]] = []
    for place, function in enumerate(functions):
        if not callable(function):
            raise ValueError(f"`functions[{place}]` must be a function, got {type(function).__name__}.")
        try:
            found.append(get_json_schema(function))
        except Exception as error:  # of the parser of docstrings: several types, none of them a ValueError
            raise ValueError(
                f"`functions[{place}]`: a model is told of a tool by its docstring and type hints, and those of "
                f"{function!r:.80} cannot be read: {error}"
            ) from error
    names = [schema["function"]["name"] for schema in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"`functions` must have names of their own, got {twice} more than once.")
    return found


def call_format(
    tokenizer: Any, schemas: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any]
) -> CallFormat:
    """Finds the format of the tokenizer's turns.

    Args:
      tokenizer: With a chat template, and perhaps a `response_template`.
      schemas: Of the tools.
      template_kwargs: Variables of the chat template.
    Raises:
      ValueError: If the template writes no calls or no answers of tools, or in a format that is not known.
    """
    asked = [{"role": "user", "content": "?"}]
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": _PROBE}]}
    chat = Chat(tokenizer, None, list(schemas), template_kwargs)
    whole = chat.render([*asked, call], generation=False)
    before = chat.render(asked, generation=True)
    if _PROBED not in whole:
        raise ValueError(
            "The chat template leaves out calls of tools, so a model cannot have learned to write them: "
            f"{OTHER_TEMPLATE}."
        )
    answer = {"role": "tool", "name": _PROBED, "content": _ANSWERED}
    prefix = reply_text(tokenizer, [answer], template_kwargs=template_kwargs)
    if _ANSWERED not in prefix:
        raise ValueError('The chat template leaves out messages of the role "tool": no tool could answer.')
    own = tokenizer.response_template if hasattr(tokenizer, "response_template") else None
    if own is not None:
        return CallFormat(tokenizer, own, schemas, prefix)
    turn = tokenizer(whole[_shared(before, whole) :], add_special_tokens=False)["input_ids"]
    for template in FORMATS.values():
        found = CallFormat(tokenizer, template, schemas, prefix)
        if [one["function"] for one in found.read(turn).get("tool_calls", [])] == [_PROBE]:
            return found
    raise ValueError(
        f"The chat template writes calls of tools in a format that is none of {sorted(FORMATS)}: "
        f"{whole[_shared(before, whole) :]!r:.200}. Set `tokenizer.response_template`, as transformers describes it."
    )


def _shared(one: str, other: str) -> int:
    """Length of the beginning that two texts share."""
    unequal = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(unequal, min(len(one), len(other)))
