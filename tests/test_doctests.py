# SPDX-License-Identifier: Apache-2.0
"""Examples in docstrings of the maths run, and everything public there has a docstring."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import jrl.losses
import jrl.ops

MODULES = [
    f"{package.__name__}.{module.name}"
    for package in (jrl.ops, jrl.losses)
    for module in pkgutil.iter_modules(package.__path__)
]
MODULES.append("jrl.suggestions")


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("name", MODULES)
def test_public_names_are_documented(name):
    module = importlib.import_module(name)
    for attribute, value in vars(module).items():
        if attribute.startswith("_") or not (inspect.isfunction(value) or inspect.isclass(value)):
            continue
        if value.__module__ == name:
            assert inspect.getdoc(value), f"{name}.{attribute} has no docstring"
