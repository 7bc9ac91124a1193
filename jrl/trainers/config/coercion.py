# SPDX-License-Identifier: Apache-2.0
"""Values of configuration files and flags, checked against the annotations of the fields they are for."""

from __future__ import annotations

import dataclasses
import os
import re
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from jrl.suggestions import did_you_mean


class _Loader(yaml.SafeLoader):
    """Safe YAML in which `1e-4` is the number it looks like; YAML 1.1 wants a dot before it believes that.

    A key that stands twice in one mapping is an error: YAML itself would keep the second without a word.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """A mapping as it is written: before `<<` merges others in, whose keys may be overridden."""
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and key.value in lines:
                raise ValueError(f"`{key.value}` stands in line {lines[key.value]} and again in line {line}.")
            lines[str(key.value)] = line
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)$"),
    list("-+0123456789."),
)


def _in_words(error: yaml.YAMLError) -> str:
    """What is wrong, and where."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return f"{' '.join(str(error).split())}."
    place = f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
    if "\\t" in str(error.problem):
        return f"a tab stands in {place}. YAML is indented by spaces, never by tabs: put spaces (`  `) there."
    return f"{error.problem}, {place}{f' ({error.context})' if error.context else ''}."


def parse_yaml(text: str) -> Any:
    """Parses a YAML document; nothing in it can run code.

    Raises:
      ValueError: If it is none, in one line.
    """
    try:
        found = yaml.load(text, _Loader)
        values = _count(found, {})
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {_in_words(error)}") from error
    except RecursionError as error:
        raise ValueError("not a configuration: its YAML is nested too deeply, or without end.") from error
    # Without aliases no document has more values than characters.
    if values > max(len(text), _MAX_VALUES):
        raise ValueError(
            f"not a configuration: its YAML repeats itself by aliases (`*name`) to {values:.2g} values, more than "
            f"{_MAX_VALUES:,}."
        )
    return found


_MAX_VALUES = 100_000
"""Of a YAML document with aliases, each counted as often as it would be written out."""


def _count(value: Any, known: dict[int, int]) -> int:
    """Values of a tree as it would be written out, each container looked at once; endless recursion is an error."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in known:
        known[id(value)] = -1
        parts = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_count(part, known) for part in parts)
    if known[id(value)] < 0:
        raise RecursionError
    return known[id(value)]


RECIPES = Path(__file__).parents[2] / "configs"
"""Where the recipes that come with the package lie."""


def shipped_recipe(name: str) -> Path:
    """The file of a recipe that comes with the package, by its name: "ppo_sentiment", or "configs/ppo_sentiment.yaml".

    Raises:
      FileNotFoundError: If there is none, naming those that are spelled alike.
    """
    found = RECIPES / f"{name.removeprefix('configs/').removesuffix('.yaml')}.yaml"
    if found.is_file() and found.resolve().is_relative_to(RECIPES.resolve()):
        return found
    names = [path.relative_to(RECIPES).with_suffix("").as_posix() for path in sorted(RECIPES.rglob("*.yaml"))]
    raise FileNotFoundError(
        f"there is no file {name}, and no recipe of this name in jrl.{did_you_mean(Path(name).stem, names)}"
    )


def read_yaml(path: str | os.PathLike[str]) -> Any:
    """Parses a YAML file, or a recipe that comes with the package (`shipped_recipe`).

    Raises:
      FileNotFoundError: If there is no such file.
      ValueError: If it is no YAML, or no text at all; the message names the file.
    """
    file = Path(path)
    if not file.is_file():
        file = shipped_recipe(str(path))
    try:
        return parse_yaml(file.read_text(encoding="utf-8"))
    except ValueError as error:  # a byte that is no text is one too
        raise ValueError(f"{path}: {error}") from error


def field_types(section: type) -> dict[str, Any]:
    """Types of a dataclass's fields, in order."""
    hints = get_type_hints(section)
    return {field.name: hints[field.name] for field in dataclasses.fields(section)}


def coerce(value: Any, expected: Any, name: str) -> Any:
    """The value as the type a field expects.

    An int passes for a float, a whole float for an int, and a string that spells a float ("1e-4", which other YAML
    readers leave a string) for that float; nothing else is converted.

    Args:
      value: What the user gave.
      expected: An annotation: a class, a union, a `Literal`, or a list or dict of these.
      name: Dotted name, for the error.
    Raises:
      TypeError: If the value is of another type.
      ValueError: If it is none of a `Literal`'s.
    """
    if expected is Any:
        return value
    origin = get_origin(expected)
    if origin in (Union, types.UnionType):
        return _coerce_union(value, get_args(expected), expected, name)
    if origin is Literal:
        if value in get_args(expected):
            return value
        choices = list(get_args(expected))
        raise ValueError(
            f"`{name}` must be one of {choices}, got {value!r}.{did_you_mean(value, map(str, choices))}"
        )
    if origin is dict and isinstance(value, Mapping):
        entry = get_args(expected)[1]
        return {key: coerce(item, entry, f"{name}.{key}") for key, item in value.items()}
    if origin is list and isinstance(value, list | tuple):
        entry = get_args(expected)[0]
        return [coerce(item, entry, f"{name}[{index}]") for index, item in enumerate(value)]
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if expected is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if expected is float and isinstance(value, str) and isinstance(parse_yaml(value), int | float):
        return float(value)
    plain_type = origin or expected
    # A bool is an int to Python, but `total_steps: true` is a mistake.
    if isinstance(value, plain_type) and not (isinstance(value, bool) and plain_type is not bool):
        return value
    raise TypeError(
        f"`{name}` must be {_describe(expected)}, got {value!r} ({type(value).__name__}).{_such_as(expected)}"
    )


def coerce_flag(text: str, expected: Any, name: str) -> Any:
    """A flag's text as the type a field expects: read as YAML, unless the field wants that very text.

    Raises:
      TypeError: If it cannot be read as that type.
      ValueError: If it is none of the accepted values.
    """
    members = get_args(expected) if get_origin(expected) in (Union, types.UnionType) else (expected,)
    value = None if text in ("None", "null") else parse_yaml(text)
    if value is None and (type(None) in members or expected is Any):
        return None
    if str in members and isinstance(value, bool) and bool in members:
        return value
    if str in members or any(
        get_origin(member) is Literal and text in get_args(member) for member in members
    ):
        return coerce(text, expected, name)
    return coerce(value, expected, name)


def _coerce_union(value: Any, members: tuple[Any, ...], expected: Any, name: str) -> Any:
    """The first member whose own type the value has, then the first that it can be converted to."""
    if value is None and type(None) in members:
        return None
    candidates = [member for member in members if member is not type(None)]
    for member in candidates:
        if isinstance(member, type) and type(value) is member:
            return value
    if len(candidates) == 1:  # its own error says more than one about the union
        return coerce(value, candidates[0], name)
    for member in candidates:
        try:
            return coerce(value, member, name)
        except (TypeError, ValueError):
            continue
    raise TypeError(
        f"`{name}` must be {_describe(expected)}, got {value!r} ({type(value).__name__}).{_such_as(expected)}"
    )


def _such_as(expected: Any) -> str:
    """Examples of a type's values, where people know it by other words."""
    known = {int: "3", float: "0.1 or 1e-4", bool: "true or false", str: '"a text"'}
    return f" Write a value such as {known[expected]}." if expected in known else ""


def _describe(expected: Any) -> str:
    return expected.__name__ if isinstance(expected, type) and not get_args(expected) else str(expected)
