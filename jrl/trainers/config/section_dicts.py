# SPDX-License-Identifier: Apache-2.0
"""Sections of a configuration as dictionaries: built, nested, merged; and warnings about them."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, cast

from jrl.models.model_object import as_source
from jrl.suggestions import did_you_mean
from jrl.trainers.config.coercion import coerce, field_types


def build_section(name: str, section: type, values: Mapping[str, Any]) -> Any:
    """A section from a dictionary, its fields known, complete and of the right types.

    Args:
      name: Of the section, for errors.
      section: Its dataclass.
      values: Field → value; copied.
    Raises:
      ValueError: On an unknown field, naming the closest one, a missing one, or a value out of range.
      TypeError: On a value of the wrong type.
    """
    return section(**typed_fields(name, section, values))


def typed_fields(name: str, section: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a section, known, complete and of the right types; whether they are in range is not asked.

    Args:
      name: Of the section, for errors.
      section: Its dataclass.
      values: Field → value; copied.
    Raises:
      ValueError: On an unknown field, naming the closest one, or a missing one.
      TypeError: On a value of the wrong type.
    """
    expected = field_types(section)
    for field in values:
        if field not in expected:
            raise ValueError(
                f"Unknown field `{name}.{field}` of {section.__name__}.{did_you_mean(field, expected)}"
            )
    missing = [f"{name}.{field}" for field in required_fields(section) if field not in values]
    if missing:
        raise ValueError(
            f"The configuration lacks {missing}, which {section.__name__} requires. Set them; "
            "`jrl config ppo > run.yaml` writes a whole one, of PPO."
        )
    copied = copy.deepcopy(dict(values))
    return {field: coerce(copied[field], expected[field], f"{name}.{field}") for field in copied}


def required_fields(section: type) -> list[str]:
    """Fields of a section's dataclass without a default."""
    return [f.name for f in fields(section) if f.default is MISSING and f.default_factory is MISSING]


def nest(name: str, value: Any) -> dict[str, Any]:
    """`nest("a.b", 1)` is `{"a": {"b": 1}}`."""
    for part in reversed(name.split(".")):
        value = {part: value}
    return cast(dict[str, Any], value)


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A deep merge; neither argument is touched, and nothing is shared with them."""
    merged = {key: copy.deepcopy(value) for key, value in base.items()}
    for key, value in changes.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = merge(cast(Mapping[str, Any], old), value) if both else copy.deepcopy(as_source(value))
    return merged


def warn_caller(text: str) -> None:
    """Warns at the line outside of this package that led here: a configuration's reader is many calls deep."""
    package = __name__.partition(".")[0]
    depth = 1
    # Of the outermost frame there is no caller, so the loop ends before it.
    while sys._getframe(depth).f_back and _is_within(sys._getframe(depth).f_globals, package):
        depth += 1
    warnings.warn(text, stacklevel=depth + 1)


def _is_within(module: Mapping[str, Any], package: str) -> bool:
    return str(module.get("__name__", "")).partition(".")[0] == package


def hint_anywhere(config: Mapping[str, Mapping[str, Any]], name: str) -> str:
    """Dotted names of a configuration that end in a bare one; else the closest one."""
    dotted = []
    for section, values in config.items():
        for field, value in values.items():
            dotted.append(f"{section}.{field}")
            dotted += [f"{section}.{field}.{key}" for key in value] if isinstance(value, dict) else []
    exact = [full for full in dotted if full.rsplit(".", 1)[1] == name]
    return f" Did you mean `{'` or `'.join(exact)}`?" if exact else did_you_mean(name, dotted)
