# SPDX-License-Identifier: Apache-2.0
"""Small chat templates of the usual shapes, and a tokenizer with their special tokens."""

from __future__ import annotations

import copy
from typing import Any

from tests.tiny import tiny_tokenizer

SPECIAL = ["<s>", "<|start|>", "<|end|>", "<|head|>"]

PLAIN = (
    "{%- for message in messages %}"
    "{{- '<|start|>' + message['role'] + ':' + (message['content'] or '') + '<|end|> ' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant:' }}{%- endif %}"
)
"""Each turn between two special tokens, and a space behind that no sampler writes."""
MARKED = (
    "{%- for message in messages %}"
    "{{- '<|start|>' + message['role'] + ':' }}"
    "{%- if message['role'] == 'assistant' %}"
    "{%- generation %}{{- message['content'] + '<|end|>' }}{%- endgeneration %}"
    "{%- else %}{{- message['content'] + '<|end|>' }}{%- endif %}"
    "{{- ' ' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant:' }}{%- endif %}"
)
"""The same text, in which the template says what assistants wrote."""
THINKING = PLAIN.replace(
    "'<|start|>assistant:' }}", "'<|start|>assistant:' + ('<think>' if think else '') }}"
).replace(
    "(message['content'] or '')",
    "('<think>' if think and message['role'] == 'assistant' and loop.last else '') + (message['content'] or '')",
)
"""The generation prefix may open a think tag, which earlier turns lose once more follows."""
LAST_THINKS = PLAIN.replace(
    "(message['content'] or '')",
    "('<think>' if message['role'] == 'assistant' and loop.last else '') + (message['content'] or '')",
)
"""The last turn of all begins with a think tag, and loses it once more follows."""
WITH_BOS = "{{- bos_token }}" + PLAIN
WITH_END = PLAIN + "{%- if not add_generation_prompt %}{{- eos_token }}{%- endif %}"
STRICT = (
    "{%- if messages[0]['role'] == 'system' %}{{ raise_exception('no system here') }}{%- endif %}" + PLAIN
)


def chat_tokenizer(template: str | None = PLAIN, **changes: Any) -> Any:
    """The tiny tokenizer with special tokens for turns; `changes` are attributes."""
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.bos_token = "<s>"
    tokenizer.chat_template = template
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return tokenizer


def user(text: str) -> dict[str, Any]:
    """A message of the user."""
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    """A message of the assistant."""
    return {"role": "assistant", "content": text}
