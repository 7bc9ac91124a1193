# SPDX-License-Identifier: Apache-2.0
"""Packages that environments come from: none is required, and each is imported when it is asked for."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np

_ONE_AT_A_TIME = threading.RLock()


def missing(package: str, extra: str, error: ImportError) -> ImportError:
    """The error where a package is not installed.

    Args:
      package: Its name on the index.
      extra: Of jrl, that brings it.
      error: Of the import.
    """
    return ImportError(f"This needs the package {package}: pip install 'jrl-post[{extra}]' ({error}).")


def reasoning_gym() -> ModuleType:
    """The package.

    Raises:
      ImportError: If it is not installed.
    """
    try:
        import reasoning_gym as found
    except ImportError as error:
        raise missing("reasoning-gym", "environments", error) from error
    return found


def textarena() -> ModuleType:
    """The package.

    Raises:
      ImportError: If it is not installed.
    """
    try:
        import textarena as found
    except ImportError as error:
        raise missing("textarena", "environments", error) from error
    return found


def verifiers() -> ModuleType:
    """The package, with the environments of its versions 0.2 and 0.3.

    Raises:
      ImportError: If it is not installed, or has none of them.
    """
    try:
        import verifiers as found
    except ImportError as error:
        raise missing("verifiers", "verifiers", error) from error
    if not hasattr(found, "MultiTurnEnv"):
        raise ImportError(
            "This needs environments of verifiers 0.2 or 0.3, which a later version has no longer: pip install "
            "'verifiers<0.4'."
        )
    return found


class Chance:
    """Chance of one world, for packages that draw from the generators of the process.

    Args:
      seed: Of both generators.
    """

    def __init__(self, seed: int) -> None:
        self._states: tuple[Any, Any] = (
            random.Random(seed).getstate(),
            np.random.RandomState(seed).get_state(),
        )

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Inside, the generators of `random` and NumPy are this world's; outside they are as they were."""
        with _ONE_AT_A_TIME:
            outside = random.getstate(), np.random.get_state()
            random.setstate(self._states[0])
            np.random.set_state(self._states[1])
            try:
                yield
            finally:
                self._states = random.getstate(), np.random.get_state()
                random.setstate(outside[0])
                np.random.set_state(outside[1])
