# SPDX-License-Identifier: Apache-2.0
"""Which tests are `broad`, `fast` or left to a run by hand (`slow`), read from the lists in `tests/tiers/`.

The marks are set while tests are collected. A line of a list is the beginning of a test's id at a file, a class or a
function; with `[...]` behind it, all cases of each function there but the first; with another pattern in brackets, the
cases that it fits.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Iterable
from pathlib import Path

import jaxlib
import pytest

FURTHER = "..."
"""Of a line: all cases of each function but the first."""
LISTS = Path(__file__).parent / "tiers"
OTHERS = ("parity", "slow", "mesh", "aot")
AS_USERS = ("slow", "aot")
"""Tiers whose programs XLA compiles as it does for users."""
QUICK = ("fast", "broad", "parity", "mesh")
"""Tiers that can be named to be compiled quickly, beside the default one."""
KNOWS_EMITTERS = jaxlib.__version__.startswith("0.10.")
"""Whether XLA has `--xla_cpu_use_fusion_emitters`; a flag that it does not know ends the process."""
ROOMS = ("ops", "losses", "learners", "rollout", "test_contracts.py", "test_layers.py")


def read_list(name: str) -> list[str]:
    """The lines of a list, without comments."""
    lines = (LISTS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def mark(items: Iterable[pytest.Item]) -> None:
    """Marks tests as slow, broad or fast, where they are."""
    slow, broad, heavy = (_Listed(name) for name in ("slow", "broad", "heavy"))
    seen = set()
    for item in items:
        function, _, case = item.nodeid.partition("[")
        case, is_first = case.removesuffix("]"), not case or function not in seen
        seen.add(function)
        if slow.names(function, case, is_first=is_first):
            item.add_marker("slow")
        if any(item.get_closest_marker(tier) for tier in OTHERS):
            continue
        if broad.names(function, case, is_first=is_first):
            item.add_marker("broad")
        elif is_in_rooms(function) and not heavy.names(function, case, is_first=is_first):
            item.add_marker("fast")


class _Listed:
    """The lines of a list, by the file, class or function that they begin with."""

    def __init__(self, name: str) -> None:
        self.patterns: dict[str, list[str]] = {}
        for line in read_list(name):
            beginning, _, pattern = line.partition("[")
            self.patterns.setdefault(beginning, []).append(pattern.removesuffix("]") or "*")

    def names(self, function: str, case: str, *, is_first: bool) -> bool:
        """Whether a line means this case of a function."""
        parts = function.split("::")
        beginnings = ("::".join(parts[: count + 1]) for count in range(len(parts)))
        patterns = (pattern for name in beginnings for pattern in self.patterns.get(name, ()))
        return any(
            not is_first if pattern == FURTHER else fnmatch.fnmatchcase(case, pattern) for pattern in patterns
        )


@functools.cache
def broad_files() -> frozenset[str]:
    """The files that hold broad tests, by their paths from the root."""
    return frozenset(line.partition("[")[0].partition("::")[0] for line in read_list("broad"))


def is_quick(expression: str) -> bool:
    """Whether `-m expression` chooses no test of the tiers that compile as users do: `slow` and `aot`.

    It names a quick tier and none of these, or it excludes both. A tier that is not excluded may be asked for: `not
    slow` chooses the tests of `aot`, too.
    """
    words = set(re.sub(r"\bnot ", "not_", expression).split())
    if words & set(AS_USERS):
        return False
    return bool(words & set(QUICK)) or all(f"not_{tier}" in words for tier in AS_USERS)


def is_in_rooms(test: str) -> bool:
    """Whether a test's id or path from the root is of a room that `fast` covers."""
    _, _, path = test.partition("tests/")
    return path.split("::")[0].split("/")[0] in ROOMS
