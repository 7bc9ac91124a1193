# SPDX-License-Identifier: Apache-2.0
"""Which tests are `broad` and which are `fast`, read from the two lists in `tests/tiers/`.

Every mark of the two is set while tests are collected. A line of a list is the beginning of a test's id at a file, a
class or a function; with `[...]` behind it, all cases of each function there but the first.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

import pytest

LISTS = Path(__file__).parent / "tiers"
OTHERS = ("parity", "slow", "mesh", "aot")
ROOMS = ("ops", "losses", "learners", "rollout", "test_contracts.py", "test_layers.py")


def read_list(name: str) -> list[str]:
    """The lines of a list, without comments."""
    lines = (LISTS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def mark(items: Iterable[pytest.Item]) -> None:
    """Marks tests of the default tier as broad or fast, where they are."""
    broad, heavy = set(read_list("broad")), set(read_list("heavy"))
    seen = set()
    for item in items:
        function, _, case = item.nodeid.partition("[")
        is_first = not case or function not in seen
        seen.add(function)
        if any(item.get_closest_marker(tier) for tier in OTHERS):
            continue
        names = set(_beginnings(function))
        if not is_first:
            names |= {f"{name}[...]" for name in names}
        if names & broad:
            item.add_marker("broad")
        elif is_in_rooms(function) and not names & heavy:
            item.add_marker("fast")


@functools.cache
def broad_files() -> frozenset[str]:
    """The files that hold broad tests, by their paths from the root."""
    return frozenset(line.partition("::")[0].removesuffix("[...]") for line in read_list("broad"))


def is_quick(expression: str) -> bool:
    """Whether `-m expression` asks for none of the tiers beside the default one and `fast`.

    A tier that an expression does not name is asked for: `not slow` chooses the broad tests, too.
    """
    return expression == "fast" or all(f"not {tier}" in expression for tier in (*OTHERS, "broad"))


def is_in_rooms(test: str) -> bool:
    """Whether a test's id or path from the root is of a room that `fast` covers."""
    _, _, path = test.partition("tests/")
    return path.split("::")[0].split("/")[0] in ROOMS


def _beginnings(function: str) -> Iterable[str]:
    parts = function.split("::")
    return ("::".join(parts[: count + 1]) for count in range(len(parts)))
