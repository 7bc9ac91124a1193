# SPDX-License-Identifier: Apache-2.0
"""TRL's questions about packages: `is_peft_available()` and its siblings ask whether a package of that name is there.

jrl itself needs none of them: an adapter's configuration may be a dict, quantisation is its own.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from functools import partial


def is_available(package: str) -> bool:
    """True where a package can be imported. Nothing is imported."""
    return importlib.util.find_spec(package) is not None


def __getattr__(name: str) -> Callable[[], bool]:
    """`is_<package>_available`."""
    found = re.fullmatch(r"is_(\w+)_available", name)
    if found is None:
        raise AttributeError(f"module 'jrl.trl.import_utils' has no attribute {name!r}")
    return partial(is_available, found[1])
