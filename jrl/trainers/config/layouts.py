# SPDX-License-Identifier: Apache-2.0
"""Configurations that another library or release wrote: whoever knows such a layout translates it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from jrl import built_in


class Layout(NamedTuple):
    """A layout of configurations, by what brings it into the present one.

    Attributes:
      translate: `config -> config`, section → field → value. What is in the present layout already comes back as it is,
        copied; the argument is left untouched.
      full_name: `(name, section -> its fields) -> dotted name` of a field that stands alone; any other name as it is.
    """

    translate: Callable[[Mapping[str, Any]], dict[str, Any]]
    full_name: Callable[[str, Mapping[str, Iterable[str]]], str]


_LAYOUTS: list[Layout] = []


def register_layout(layout: Layout) -> None:
    """Makes a layout known to everything that reads a configuration."""
    _LAYOUTS.append(layout)


def _layouts() -> list[Layout]:
    """All layouts, jrl's own among them."""
    for module in built_in.LAYOUTS:
        importlib.import_module(module)
    return _LAYOUTS


def in_present_layout(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as the present release writes it."""
    found = dict(config)
    for layout in _layouts():
        found = layout.translate(found)
    return found


def full_name(name: str, known: Mapping[str, Iterable[str]]) -> str:
    """The dotted name of a field, as far as a layout knows it by another.

    Args:
      name: Such as "lr" or "init_kl_coef".
      known: Section → its fields.
    """
    for layout in _layouts():
        name = layout.full_name(name, known)
    return name
