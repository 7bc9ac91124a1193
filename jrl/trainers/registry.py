# SPDX-License-Identifier: Apache-2.0
"""Names of trainers and methods, and what they stand for: the only look-up by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from jrl.learners.config import MethodConfig
from jrl.learners.ilql import ILQLConfig
from jrl.learners.ppo import PPOConfig
from jrl.learners.rft import RFTConfig
from jrl.learners.sft import SFTConfig

if TYPE_CHECKING:
    from jrl.trainers.base import Trainer

Class = TypeVar("Class", bound=type)

METHODS: dict[str, type[MethodConfig]] = {
    "ppoconfig": PPOConfig,
    "ilqlconfig": ILQLConfig,
    "sftconfig": SFTConfig,
    "rftconfig": RFTConfig,
}
TRAINERS: dict[str, type[Trainer]] = {}


def register_trainer(name: str) -> Callable[[Class], Class]:
    """Class decorator: makes a trainer known under this name, and under trlX's (`Accelerate` in front)."""

    def register(trainer: Class) -> Class:
        TRAINERS[name.lower()] = trainer
        return trainer

    return register


def get_trainer(name: str) -> type[Trainer]:
    """The trainer of a name; case does not matter, and `AcceleratePPOTrainer` is `PPOTrainer`.

    Raises:
      ValueError: If there is none, with the known names.
    """
    return look_up(name.lower().removeprefix("accelerate"), TRAINERS, field="train.trainer", given=name)


def get_method(name: str) -> type[MethodConfig]:
    """The config class of a method's name; case does not matter.

    Raises:
      ValueError: If there is none, with the known names.
    """
    return look_up(name.lower(), METHODS, field="method.name", given=name)


def look_up(key: str, table: Mapping[str, Class], *, field: str, given: str) -> Class:
    """The class of a name.

    Raises:
      ValueError: Naming the field, what was given, what is known and what is closest.
    """
    if key in table:
        return table[key]
    near = difflib.get_close_matches(key, table, n=1)
    hint = f" Did you mean {table[near[0]].__name__}?" if near else ""
    known = ", ".join(sorted(entry.__name__ for entry in table.values()))
    raise ValueError(f"`{field}` must be one of {known}, got {given!r}.{hint}")
