# SPDX-License-Identifier: Apache-2.0
"""Chat messages and templates."""

from jrl.data.chat.templates import with_chat_template

__all__ = [
    "with_chat_template",
]
