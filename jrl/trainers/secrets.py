# SPDX-License-Identifier: Apache-2.0
"""Secrets in a configuration: what a run writes of it (checkpoints, trackers, model cards) has them left out.

A value is a secret by the name that it stands under (`hub_token`, `api_key`, `password`, ...), or by how it looks: the
tokens of well-known services, and the user and password in an address. Tokens of texts (`eos_token`,
`max_new_tokens`) are none.
"""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "<hidden>"
"""Stands for a secret."""

_NAME = re.compile(
    r"(^|_)(password|passwd|passphrase|secret|credentials?|bearer|authorization"
    r"|(api|access|private|secret|auth|account|encryption)_?key)(_|$)"
)
_TEXT_TOKEN = re.compile(
    r"(^|_)(bos|eos|unk|sep|pad|cls|mask|image|audio|video|special|begin|start|end|stop|turn|response|instruction|prefix"
    r"|suffix|middle|space|newline|first|last|next|per)_token$"
)
_LOOKS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|sk-[A-Za-z0-9_-]{16,}"  # OpenAI, Anthropic
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"  # GitHub, GitLab
    r"|xox[abprs]-[A-Za-z0-9-]{10,}|AIza[\w-]{30,}|(?:AKIA|ASIA)[A-Z0-9]{16})"  # Slack, Google, AWS
)
_ADDRESS = re.compile(r"\b([a-z][a-z0-9+.-]{1,20}://)[^\s/@]{1,200}@", re.IGNORECASE)


def without_secrets(value: Any, name: str = "") -> Any:
    """A plain value (as YAML and JSON know it) with every secret replaced by `HIDDEN`; what has none is equal.

    Args:
      value: Dictionaries, lists, texts, numbers.
      name: Of the field that it stands under.
    """
    if isinstance(value, dict):
        return {key: without_secrets(entry, str(key)) for key, entry in value.items()}
    if isinstance(value, list):
        return [without_secrets(entry, name) for entry in value]
    if not isinstance(value, str) or not value:
        return value
    return HIDDEN if _is_secret(name) else hide_secrets(value)


def hide_secrets(text: str) -> str:
    """A text with what looks like a secret replaced by `HIDDEN`."""
    return _ADDRESS.sub(rf"\1{HIDDEN}@", _LOOKS.sub(HIDDEN, text))


def _is_secret(name: str) -> bool:
    """Whether a field of this name holds a secret."""
    # `hubToken` and `hub-token` are `hub_token`.
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", "_", name).lower()
    if words.endswith("token") and (words == "token" or words.endswith("_token")):
        return _TEXT_TOKEN.search(words) is None
    return _NAME.search(words) is not None
