# SPDX-License-Identifier: Apache-2.0
"""Examples in docstrings run, and everything public in the maths has a docstring."""

import ast
import doctest
import importlib
import inspect
import itertools
import pkgutil
from pathlib import Path

import pytest

import jrl.losses
import jrl.ops

MATHS = [
    f"{package.__name__}.{module.name}"
    for package in (jrl.ops, jrl.losses)
    for module in pkgutil.iter_modules(package.__path__)
]
ROOT = Path(jrl.__file__).parent
WITH_EXAMPLES = [
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
    for path in sorted(ROOT.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_run(name):
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted and not found.failed


@pytest.mark.parametrize("name", MATHS)
def test_public_names_are_documented(name):
    module = importlib.import_module(name)
    for attribute, value in vars(module).items():
        if attribute.startswith("_") or not (inspect.isfunction(value) or inspect.isclass(value)):
            continue
        if value.__module__ == name:
            assert inspect.getdoc(value), f"{name}.{attribute} has no docstring"


@pytest.mark.parametrize("package", ["jrl.ops", "jrl.losses"])
def test_everything_exported_is_documented(package):
    """Behind a table of losses or a type stands a string: neither has a docstring of its own."""
    room = importlib.import_module(package)
    values = {name: getattr(room, name) for name in room.__all__}
    plain = {
        name: value for name, value in values.items() if inspect.isfunction(value) or inspect.isclass(value)
    }
    assert [name for name, value in plain.items() if not inspect.getdoc(value)] == []
    constants = {name for name in values if name not in plain} | {
        name for name in vars(room) if name.isupper()
    }
    documented = set()
    for module in MATHS:
        lines = inspect.getsource(importlib.import_module(module))
        body = ast.parse(lines).body
        for node, after in itertools.pairwise(body):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            documented |= {target.id for target in targets if is_text and isinstance(target, ast.Name)}
    assert constants - documented == set()
