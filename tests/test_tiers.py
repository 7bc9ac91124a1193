# SPDX-License-Identifier: Apache-2.0
"""The lists of tiers name tests that exist, and mark what they say."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.tiers import KNOWS_EMITTERS, broad_files, is_in_rooms, is_quick, read_list

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["broad", "heavy", "slow"])
def test_every_line_names_a_test(name: str) -> None:
    stale = []
    for line in read_list(name):
        path, *names = line.partition("[")[0].split("::")
        text = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).is_file() else ""
        if not text or not all(re.search(rf"^\s*(def|class) {one}\b", text, re.MULTILINE) for one in names):
            stale.append(line)
    assert stale == [], f"tests/tiers/{name}.txt names what is not there"
    assert len(set(read_list(name))) == len(read_list(name))


def test_what_is_slow_is_not_listed_as_broad_too() -> None:
    assert set(read_list("slow")) & set(read_list("broad")) == set()


def test_what_is_heavy_is_in_a_room_that_fast_covers() -> None:
    assert [line for line in read_list("heavy") if not is_in_rooms(line.partition("[")[0])] == []


def test_marks(pytestconfig: pytest.Config, request: pytest.FixtureRequest) -> None:
    """This run has been marked: nothing broad is left where the default expression holds."""
    if "not broad" in pytestconfig.option.markexpr:
        assert not [item.nodeid for item in request.session.items if item.get_closest_marker("broad")]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("not parity and not slow and not mesh and not aot and not broad", True),
        ("fast", True),
        ("broad", True),
        ("mesh", True),
        ("parity and not slow", True),
        ("broad or parity and not slow", True),
        ("not slow and not aot", True),
        ("parity or slow", False),
        ("not parity and slow", False),
        ("not parity and not slow", False),
        ("slow", False),
        ("aot", False),
        ("", False),
    ],
)
def test_only_slow_and_aot_compile_as_users_do(expression: str, expected: bool) -> None:
    assert is_quick(expression) == expected


def test_the_broad_tier_reads_the_files_of_its_list() -> None:
    assert "tests/test_pages.py" in broad_files() and "tests/learners/test_grpo.py" in broad_files()
    assert all((ROOT / file).is_file() for file in broad_files())


@pytest.mark.parametrize(
    ("expression", "file", "ignored"),
    [
        ("broad", "tests/learners/test_grpo.py", False),
        ("broad", "tests/test_mesh.py", True),
        ("not slow", "tests/test_mesh.py", False),
    ],
)
def test_a_file_without_broad_tests_is_not_read_for_them(
    expression: str, file: str, ignored: bool, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pytestconfig.option, "markexpr", expression)
    found = pytestconfig.hook.pytest_ignore_collect(collection_path=ROOT / file, config=pytestconfig)
    assert bool(found) == ignored


def test_quick_tiers_compile_quickly(pytestconfig: pytest.Config) -> None:
    flags = os.environ["XLA_FLAGS"]
    assert "xla_backend_optimization_level=0" in flags
    if is_quick(pytestconfig.option.markexpr):
        assert ("xla_cpu_use_fusion_emitters" in flags) == KNOWS_EMITTERS
