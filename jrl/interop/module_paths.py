# SPDX-License-Identifier: Apache-2.0
"""Module paths of another library: modules without files, whose names a face looks up when they are asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from types import ModuleType
from typing import Any


def register_paths(root: str, paths: Iterable[str], find: Callable[[str, str], Any]) -> None:
    """Makes the modules, so that an import statement finds them.

    Args:
      root: Package that they belong to.
      paths: Dotted, below the root.
      find: `(path, name) -> object`; raises AttributeError where there is none.
    """
    for path in paths:
        module = ModuleType(f"{root}.{path}", f"Names of `{root}`, as another library's module has them.")
        module.__getattr__ = partial(_look_up, root, path, find)  # type: ignore[method-assign]
        module.__path__ = []
        sys.modules.setdefault(module.__name__, module)


def _look_up(root: str, path: str, find: Callable[[str, str], Any], name: str) -> Any:
    inner = sys.modules.get(f"{root}.{path}.{name}")
    if inner is not None:
        return inner
    try:
        return find(path, name)
    except AttributeError as error:
        raise AttributeError(f"module '{root}.{path}' has no attribute {name!r}") from error
