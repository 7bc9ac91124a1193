# SPDX-License-Identifier: Apache-2.0
"""A configuration with what each field means, as the docstrings of its sections say it."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Sequence
from typing import Any

import yaml

from jrl.suggestions import did_you_mean
from jrl.trainers.config.trl_config import TRLConfig

_WIDTH = 100
"""Columns of a line of YAML or help."""
_FLAG = 42
"""Columns of a flag and its value, beside which its meaning stands."""


def field_notes(kind: type) -> dict[str, str]:
    """Descriptions of a dataclass's fields, from the section Attributes of its docstring and those of its bases."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        section = inspect.cleandoc(vars(base).get("__doc__") or "").partition("Attributes:\n")[2]
        section = re.split(r"^\S", section, flags=re.MULTILINE)[0]
        entries = re.split(r"^  (?=\w+:)", section, flags=re.MULTILINE)[1:]
        found |= {
            name: " ".join(text.split()) for name, _, text in (entry.partition(":") for entry in entries)
        }
    return found


def as_yaml(config: TRLConfig, sections: Sequence[str] = ()) -> str:
    """A recipe that `TRLConfig.load_yaml` reads back, each field under what it means.

    Args:
      config: Without model objects.
      sections: Which ones, in their own order; none: all six.
    Raises:
      ValueError: If there is no such section.
    """
    values = config.to_dict()
    for name in sections:
        if name not in values:
            raise ValueError(
                f"Unknown section `{name}`; there are {list(values)}.{did_you_mean(name, list(values))}"
            )
    parts = [
        _section(name, values[name], vars(config)[name]) for name in values if name in (sections or values)
    ]
    return "\n".join(parts)


def _section(name: str, values: dict[str, Any], section: Any) -> str:
    notes, lines = field_notes(type(section)), [f"{name}:"]
    for field, value in values.items():
        note = notes.get(field, "")
        lines += textwrap.wrap(note, _WIDTH, initial_indent="  # ", subsequent_indent="  # ")
        text = yaml.safe_dump({field: _plain(value)}, sort_keys=False, allow_unicode=True, width=_WIDTH)
        lines += [f"  {line}" for line in text.splitlines()]
    return "\n".join(lines) + "\n"


def as_flags(config: TRLConfig) -> str:
    """Help on the fields of a configuration: each one's flag, its value, and the first sentence on its meaning."""
    lines = []
    for name, section in vars(config).items():
        notes = field_notes(type(section))
        for field, value in vars(section).items():
            head = f"  --{name}.{field} {_short(value)}"
            meaning = re.split(r"(?<=[.;])\s", notes.get(field, ""), maxsplit=1)[0].rstrip(".;")
            rest = textwrap.wrap(meaning, _WIDTH - _FLAG) or [""]
            if len(head) >= _FLAG:  # the meaning begins below
                lines.append(head)
                head = ""
            lines += [f"{head if row == 0 else '':<{_FLAG}}{text}".rstrip() for row, text in enumerate(rest)]
    return "\n".join(line for line in lines if line)


def _plain(value: Any) -> Any:
    """As YAML writes it: tuples are lists."""
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def _short(value: Any) -> str:
    """A value on one line, as a flag takes it."""
    text = yaml.safe_dump(_plain(value), default_flow_style=True, sort_keys=False, width=1000)
    return text.removesuffix("...\n").strip()
