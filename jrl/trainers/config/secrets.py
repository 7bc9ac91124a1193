# SPDX-License-Identifier: Apache-2.0
"""Secrets in a configuration: what a run writes of it (checkpoints, trackers, model cards) has them left out.

A value is a secret by a name that it stands under, however deep (`hub_token`, `apiKeys`, `password`, ...), or by how it
looks: keys that `detect-secrets` knows, private keys, what a header or address carries. Tokens of texts (`eos_token`,
`max_new_tokens`) are none; nor is what only switches something on (`use_auth_token: true`). What this cannot know is
said in `docs/security.md`.
"""

from __future__ import annotations

import functools
import logging
import re
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from detect_secrets.plugins.base import RegexBasedDetector

HIDDEN = "<hidden>"
"""Stands for a secret."""

_NAME = re.compile(
    r"passwords?(_|\d*$)|(^|_)(passwd|pwd|passphrase|secret|credential|cred|bearer|authorization|dsn"
    r"|(connection|conn)_?str(ing)?|webhook(_ur[il])?|sas_ur[il]|signed_ur[il]|(api|access|private|secret|auth|account|encryption|ssh|signing)_?key)s?(_|\d*$)"
)
_TOKEN = re.compile(
    r"(^|_)(token|(hf|hub|auth|access|refresh|bearer|api|session|service|private|personal|secret)_?tokens)_?\d*$"
    r"|(^|_)(hf|hub|auth|access|refresh|bearer|api|session)token_?\d*$"
)
_TEXT_TOKEN = re.compile(
    r"(^|_)(bos|eos|unk|sep|pad|cls|mask|image|audio|video|special|begin|start|end|stop|turn|response|instruction|prefix"
    r"|suffix|middle|space|newline|first|last|next|per|split)_token_?\d*$"
)
_SERVICES = frozenset(
    {
        *(
            "anthropic",
            "aws",
            "azure",
            "cohere",
            "comet",
            "databricks",
            "datadog",
            "discord",
            "gcp",
            "github",
            "gitlab",
        ),
        *(
            "google",
            "grafana",
            "groq",
            "hf",
            "huggingface",
            "mailgun",
            "mistral",
            "neptune",
            "nvidia",
            "openai",
            "perplexity",
        ),
        *(
            "replicate",
            "sendgrid",
            "sentry",
            "slack",
            "stripe",
            "telegram",
            "together",
            "twilio",
            "wandb",
            "xai",
        ),
    }
)
"""Services that a run's configuration may hold a key of, as `<service>_key`."""
_DETECTORS_ASIDE = (
    *("KeywordDetector", "Base64HighEntropyString", "HexHighEntropyString", "IPPublicDetector"),
    *("BasicAuthDetector", "PrivateKeyDetector"),
)
"""They take hashes, revisions and addresses for secrets; the last two leave a part of what is hidden here."""
_SERVICE_KEY = re.compile(r"(?:^|_)([a-z0-9]+)_?keys?_?\d*$")
_RANDOM = re.compile(r"(?=[^0-9]*[0-9])(?=[^A-Za-z]*[A-Za-z])[A-Za-z0-9_+/=.~-]{20,}")
"""A value that a person would not write as a column's name, under a name such as `my_key`."""
# Beside the detectors': keys that are cut short, or of services that they do not know.
_LOOKS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|gsk_[A-Za-z0-9]{16,}|xai-[A-Za-z0-9]{16,}|nvapi-[\w-]{16,}|r8_[A-Za-z0-9]{16,}"  # Groq, xAI, NVIDIA, Replicate
    r"|[sr]k_(?:live|test)_\w{8,}|pypi-Ag[\w-]{14,}|npm_[A-Za-z0-9]{16,}"  # Stripe, PyPI, npm
    r"|ey[A-Za-z0-9_-]{8,}\.ey[A-Za-z0-9_-]{8,}(?:\.[\w+/=-]*)?"  # JSON Web Token
    r"|sk-[A-Za-z0-9_-]{16,}|dapi[0-9a-f]{32}"  # OpenAI, Anthropic, Databricks
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"  # GitHub, GitLab
    r"|xox[abprs]-[A-Za-z0-9-]{10,}|AIza[\w-]{30,}|(?:AKIA|ASIA)[A-Z0-9]{16})"  # Slack, Google, AWS
)
# To the last `@` before the host's end: passwords hold some.
_ADDRESS = re.compile(r"\b([a-z][a-z0-9+.-]{1,20}://)[^\s/]+@", re.IGNORECASE)
_QUERY = re.compile(
    r"([?&;#](?:[\w.-]*[_.-])?(?:token|key|apikey|secret|password|passwd|pwd|sig|signature|credential|auth|code)=)"
    r"[^&#;\s\"'<>]+",
    re.IGNORECASE,
)
_HEADER = re.compile(
    r"\b((?:(?:proxy-)?authorization|x-api-key|api-key|x-auth-token)[\"']?\s*[:=]\s*[\"']?)[^\"'\r\n,}]+",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\b(bearer\s+)[\w.~+/=-]{12,}", re.IGNORECASE)
_PRIVATE_KEY = re.compile(
    r"-----BEGIN[ A-Z0-9_-]{0,100}PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END[ A-Z0-9_-]{0,100}-----|\Z)",
    re.DOTALL,
)
# `AccountKey=...;` of a connection string.
_PAIR = re.compile(
    r"\b((?:account_?key|shared_?access_?key|password|pwd|secret|api_?key|access_?key|access_?token)\s*=\s*)[^;&\s\"']+",
    re.IGNORECASE,
)


def without_secrets(value: Any, name: str = "") -> Any:
    """A plain value (as YAML and JSON know it) with every secret replaced by `HIDDEN`; what has none is equal.

    Args:
      value: Dictionaries, lists, texts, numbers.
      name: Of the field that it stands under.
    """
    if _is_secret(name) or _is_key(name, value):
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
    found = _LOOKS.sub(HIDDEN, _PRIVATE_KEY.sub(HIDDEN, text))
    for detector in _detectors():
        for secret in detector.analyze_string(found):
            found = found.replace(secret, HIDDEN)
    for pattern in (_QUERY, _HEADER, _BEARER, _PAIR):
        found = pattern.sub(rf"\1{HIDDEN}", found)
    return _ADDRESS.sub(rf"\1{HIDDEN}@", found)


@functools.cache
def _detectors() -> list[RegexBasedDetector]:
    """Detectors of detect-secrets that know a secret by its form."""
    shown = warnings.showwarning
    from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
    from detect_secrets.plugins.base import RegexBasedDetector

    found: list[Any] = list(get_mapping_from_secret_type_to_class().values())
    if warnings.showwarning is not shown:  # its import gives all warnings of the process to `logging`
        logging.captureWarnings(False)
    chosen = [
        one for one in found if issubclass(one, RegexBasedDetector) and one.__name__ not in _DETECTORS_ASIDE
    ]
    return [one() for one in chosen]


def _words(name: str) -> str:
    """A name in one spelling: `hubToken`, `HUBToken` and `hub-token` are `hub_token`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[^A-Za-z0-9]+", "_", name).lower()


def _is_key(name: str, value: Any) -> bool:
    """True where a field named `..._key` holds one: of a known service, or a text that nobody would call a column."""
    match = _SERVICE_KEY.search(_words(name))
    if match is None:
        return False
    return match[1] in _SERVICES or (isinstance(value, str) and _RANDOM.fullmatch(value) is not None)


def _is_secret(name: str) -> bool:
    """True where a field of this name holds a secret."""
    words = _words(name)
    if _TOKEN.search(words):
        return _TEXT_TOKEN.search(words) is None
    return _NAME.search(words) is not None
