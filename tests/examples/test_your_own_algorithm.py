# SPDX-License-Identifier: Apache-2.0
"""The example of an algorithm of your own: it runs, and it imports nothing but what jrl offers."""

import ast

import pytest

from tests.examples.processes import EXAMPLES, finish, start

PROGRAM = EXAMPLES / "your_own_algorithm.py"


def test_it_imports_the_public_package_alone():
    tree = ast.parse(PROGRAM.read_text(encoding="utf-8"))
    found = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [name for name in found if name.startswith("jrl")]


@pytest.mark.slow
def test_it_runs(tmp_path):
    flags = ["--output-dir", tmp_path / "run", "--steps", 2, "--sft-steps", 2]
    finish(start(*flags, cwd=tmp_path, program=[PROGRAM]))
    assert (tmp_path / "run" / "reinforce" / "checkpoint_2").exists()
