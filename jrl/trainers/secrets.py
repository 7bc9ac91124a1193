# SPDX-License-Identifier: Apache-2.0
"""Secrets in a configuration: what a run writes of it (checkpoints, trackers, model cards) has them left out.

A value is a secret by a name that it stands under, however deep (`hub_token`, `apiKeys`, `password`, ...), or by how it
looks: the tokens of well-known services, and the user and password in an address. Tokens of texts (`eos_token`,
`max_new_tokens`) are none; nor is what only switches something on (`use_auth_token: true`).
"""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "<hidden>"
"""Stands for a secret."""

_NAME = re.compile(
    r"passwords?(_|\d*$)|(^|_)(passwd|pwd|passphrase|secret|credential|cred|bearer|authorization"
    r"|(api|access|private|secret|auth|account|encryption|ssh|signing)_?key)s?(_|\d*$)"
)
_TOKEN = re.compile(
    r"(^|_)(token|(hf|hub|auth|access|refresh|bearer|api|session|service|private|personal|secret)_?tokens)_?\d*$"
    r"|(^|_)(hf|hub|auth|access|refresh|bearer|api|session)token_?\d*$"
)
_TEXT_TOKEN = re.compile(
    r"(^|_)(bos|eos|unk|sep|pad|cls|mask|image|audio|video|special|begin|start|end|stop|turn|response|instruction|prefix"
    r"|suffix|middle|space|newline|first|last|next|per|split)_token_?\d*$"
)
_LOOKS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|sk-[A-Za-z0-9_-]{16,}"  # OpenAI, Anthropic
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"  # GitHub, GitLab
    r"|xox[abprs]-[A-Za-z0-9-]{10,}|AIza[\w-]{30,}|(?:AKIA|ASIA)[A-Z0-9]{16})"  # Slack, Google, AWS
)
# To the last `@` before the host's end: passwords hold some.
_ADDRESS = re.compile(r"\b([a-z][a-z0-9+.-]{1,20}://)[^\s/]+@", re.IGNORECASE)


def without_secrets(value: Any, name: str = "") -> Any:
    """A plain value (as YAML and JSON know it) with every secret replaced by `HIDDEN`; what has none is equal.

    Args:
      value: Dictionaries, lists, texts, numbers.
      name: Of the field that it stands under.
    """
    if _is_secret(name):
        return _hidden(value)
    if isinstance(value, dict):
        return {key: without_secrets(entry, str(key)) for key, entry in value.items()}
    if isinstance(value, list):
        return [without_secrets(entry) for entry in value]
    return hide_secrets(value) if isinstance(value, str) else value


def _hidden(value: Any) -> Any:
    """A value below a secret name: its shape, and every text and number in it hidden."""
    if isinstance(value, dict):
        return {key: _hidden(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_hidden(entry) for entry in value]
    return value if value is None or isinstance(value, bool) or value == "" else HIDDEN


def hide_secrets(text: str) -> str:
    """A text with what looks like a secret replaced by `HIDDEN`."""
    return _ADDRESS.sub(rf"\1{HIDDEN}@", _LOOKS.sub(HIDDEN, text))


def _is_secret(name: str) -> bool:
    """Whether a field of this name holds a secret."""
    # `hubToken`, `HUBToken` and `hub-token` are `hub_token`.
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[^A-Za-z0-9]+", "_", name).lower()
    if _TOKEN.search(words):
        return _TEXT_TOKEN.search(words) is None
    return _NAME.search(words) is not None
