# SPDX-License-Identifier: Apache-2.0
"""The examples use what jrl offers in public and nothing else: modules of a short list, and names that these list."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PUBLIC = {
    "jrl",
    "jrl.cli",
    "jrl.data",
    "jrl.image_rewards",
    "jrl.learners",
    "jrl.losses",
    "jrl.models.diffusion",
    "jrl.ops",
    "jrl.rewards",
    "jrl.rollout",
    "jrl.trl",
    "jrl.trlx",
    "jrl.typing",
}


def offers(module: str, name: str) -> bool:
    return module in PUBLIC and (
        name in importlib.import_module(module).__all__ or f"{module}.{name}" in PUBLIC
    )


def private(tree: ast.AST) -> list[str]:
    """What a script takes of jrl that is not public, in `import`, `from ... import` and `jrl.a.b`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] == "jrl" and a.name not in PUBLIC]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jrl":
            found += [f"{node.module}.{a.name}" for a in node.names if not offers(node.module or "", a.name)]
        elif isinstance(node, ast.Attribute):
            module, _, name = ast.unparse(node).rpartition(".")
            is_module = module == "jrl" or isinstance(reached(module), ModuleType)
            if is_module and not offers(module, name):
                found.append(f"{module}.{name}")
    return found


def reached(dotted: str) -> object:
    """What a dotted name of a script means where it begins with jrl; None for any other."""
    first, *names = dotted.split(".")
    found = importlib.import_module("jrl") if first == "jrl" else None
    for name in names:
        found = getattr(found, name, None)
    return found


@pytest.mark.parametrize(
    "path", sorted(EXAMPLES.rglob("*.py")), ids=lambda path: path.relative_to(EXAMPLES).as_posix()
)
def test_an_example_uses_public_names_alone(path):
    assert private(ast.parse(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "line",
    [
        "import jrl.trainers.base",
        "from jrl.trainers.base import Trainer",
        "from jrl.data import tokenizer",
        "import jrl; jrl.trainers.base.Trainer",
        "import jrl; jrl.ops.alignment",
        "from jrl import api",
    ],
)
def test_a_private_name_is_seen(line):
    assert private(ast.parse(line))


@pytest.mark.parametrize("module", sorted(PUBLIC))
def test_what_is_listed_is_there_and_described(module):
    found = importlib.import_module(module)
    assert found.__doc__
    assert [name for name in found.__all__ if not hasattr(found, name)] == []
