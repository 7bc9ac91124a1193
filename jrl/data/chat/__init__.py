# SPDX-License-Identifier: Apache-2.0
"""Chat messages and templates."""

from jrl.data.chat.messages import is_dialogue
from jrl.data.chat.templates import render_prompt, with_chat_template

__all__ = [
    "is_dialogue",
    "render_prompt",
    "with_chat_template",
]
