# SPDX-License-Identifier: Apache-2.0
"""A reader who looks for a loss finds it in `jrl.losses`."""

import importlib
import inspect
import pkgutil

from jrl import losses


def test_every_public_function_and_class_is_exported() -> None:
    modules = [
        importlib.import_module(f"jrl.losses.{each.name}") for each in pkgutil.iter_modules(losses.__path__)
    ]
    defined = {
        name
        for module in modules
        for name, value in vars(module).items()
        if (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == module.__name__
        and not name.startswith("_")
    }
    assert len(defined) > 50
    assert defined - set(losses.__all__) == set()
    assert [name for name in losses.__all__ if name not in vars(losses)] == []
