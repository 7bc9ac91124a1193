# SPDX-License-Identifier: Apache-2.0
"""Typed values of configuration fields: YAML text in, checked Python out, unknown names refused."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

import yaml


class ConfigLoader(yaml.SafeLoader):
    """Safe YAML in which `1e-4` is a number, as everybody who writes it means."""


ConfigLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"),
    list("-+0123456789."),
)


def parse_yaml(text: str) -> Any:
    """One YAML document."""
    return yaml.load(text, Loader=ConfigLoader)  # a SafeLoader: makes plain values only


def refuse_unknown(names: Iterable[str], known: Iterable[str], *, where: str) -> None:
    """Raises for the first name that is not known.

    Raises:
      ValueError: Naming it and the closest known one.
    """
    known = list(known)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean `{near[0]}`?" if near else ""
            raise ValueError(f"unknown {where} `{name}`; known are {', '.join(known)}.{hint}")


def typed(value: Any, annotation: Any, *, name: str) -> Any:
    """A value as its field's annotation wants it: a whole number may stand for a float, nothing else is cast.

    Args:
      value: From a file, a flag or a caller.
      annotation: Of the field.
      name: Of the field, for the message.
    Raises:
      TypeError: If it is of another type.
    """
    options = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    for option in options:
        origin = typing.get_origin(option) or option
        if origin is Any or (origin is type(None) and value is None):
            return value
        if origin is dict and isinstance(value, Mapping):
            return dict(value)
        if origin is list and isinstance(value, list | tuple):
            return list(value)
        if origin is bool and isinstance(value, bool):
            return value
        if origin in (int, float, str) and isinstance(value, origin) and not isinstance(value, bool):
            return value
    if float in options and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if int in options and isinstance(value, float) and value.is_integer():
        return int(value)
    expected = " or ".join("null" if option is type(None) else _plain_name(option) for option in options)
    raise TypeError(f"`{name}` must be {expected}, got {value!r} ({type(value).__name__}).")


def build(section_class: type, values: Mapping[str, Any], *, section: str) -> Any:
    """A section's dataclass from plain values.

    Raises:
      ValueError: On an unknown or a missing field.
      TypeError: On a value of the wrong type.
    """
    known = {field.name: field for field in dataclasses.fields(section_class)}
    refuse_unknown(values, known, where=f"field of `{section}`")
    missing = [
        name
        for name, field in known.items()
        if name not in values
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"`{section}.{missing[0]}` is required and missing.")
    hints = typing.get_type_hints(section_class)
    return section_class(
        **{name: typed(value, hints[name], name=f"{section}.{name}") for name, value in values.items()}
    )


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _plain_name(option: Any) -> str:
    origin = typing.get_origin(option) or option
    return {"dict": "a mapping", "list": "a list", "str": "text", "bool": "true or false"}.get(
        origin.__name__, f"a number ({origin.__name__})"
    )
