# SPDX-License-Identifier: Apache-2.0
"""Examples in docstrings run, and everything public in the maths has a docstring."""

import doctest
import importlib
import inspect
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
