# SPDX-License-Identifier: Apache-2.0
"""Configurations that another library or release wrote: whoever knows such a layout translates it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple


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


def in_present_layout(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as the present release writes it."""
    found = dict(config)
    for layout in _LAYOUTS:
        found = layout.translate(found)
    return found


def full_name(name: str, known: Mapping[str, Iterable[str]]) -> str:
    """The dotted name of a field, as far as a layout knows it by another.

    Args:
      name: Such as "lr" or "init_kl_coef".
      known: Section → its fields.
    """
    for layout in _LAYOUTS:
        name = layout.full_name(name, known)
    return name
