# SPDX-License-Identifier: Apache-2.0
"""Arguments that a foreign signature takes and that mean nothing here: accepted, and said once."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

_told: set[str] = set()


def warn_ignored(name: str, why: str) -> None:
    """Warns, the first time in this process, that an argument has no effect.

    Args:
      name: What was given, as its caller wrote it.
      why: The reason, or what does the work instead.
    """
    if name not in _told:
        _told.add(name)
        warnings.warn(f"`{name}` has no effect in jrl: {why}.", stacklevel=4)


def check_keywords(where: str, given: Mapping[str, Any], ignored: Mapping[str, str]) -> None:
    """Checks the keywords that an adapter takes for the sake of the seed's signature.

    Args:
      where: Method that got them.
      given: What it got and does not know.
      ignored: Names that mean nothing here, and why.
    Raises:
      TypeError: On any other name.
    """
    for name in given:
        if name not in ignored:
            raise TypeError(f"{where} got an unknown argument {name!r}; it ignores {sorted(ignored)}.")
        warn_ignored(f"{where}: {name}", ignored[name])


def flat_names(nested: Mapping[str, Any], *, sep: str = "/", prefix: str = "") -> dict[str, Any]:
    """Makes one mapping of nested ones.

    Args:
      nested: Name → value, or a mapping of the same kind.
      sep: Joins names.
      prefix: Stands before all of them, as it is.
    Example:
      >>> flat_names({"a": {"b": 1}, "c": 2})
      {'a/b': 1, 'c': 2}
    """
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        full = f"{prefix}{name}"
        inner = isinstance(value, Mapping)
        flat |= flat_names(value, sep=sep, prefix=full + sep) if inner else {full: value}
    return flat
