# SPDX-License-Identifier: Apache-2.0
"""trlX's registries: decorators, bare or with a name, and look-ups in which case does not matter.

A class of this package's own shape (`AccelerateRLTrainer`, `BasePipeline`) is known to `jrl.trlx.train` alone; a
trainer or pipeline of jrl's own shape, and every method, is known to `jrl.train` too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from jrl.data.prompts import PromptSet
from jrl.trainers import config as native
from jrl.trainers.base import Trainer
from jrl.trainers.config import Registry

Class = TypeVar("Class", bound=type)

TRAINERS: Registry[Any] = Registry("train.trainer", prefix="Accelerate")
PIPELINES: Registry[Any] = Registry("train.pipeline")
ORCHESTRATORS: Registry[Any] = Registry("train.orchestrator")

register_method = native.register_method
get_method = native.get_method


def register_trainer(name: Any) -> Any:
    """Makes a trainer known: `@register_trainer` under the class's name, `@register_trainer("name")` under that one."""
    return _decorator(name, lambda cls: native.TRAINERS if issubclass(cls, Trainer) else TRAINERS)


def register_datapipeline(name: Any) -> Any:
    """Registers a pipeline, which `train.pipeline` names."""
    return _decorator(name, lambda cls: native.PIPELINES if issubclass(cls, PromptSet) else PIPELINES)


def register_orchestrator(name: Any) -> Any:
    """Registers an orchestrator of trlX 0.2 to 0.4."""
    return _decorator(name, lambda cls: ORCHESTRATORS)


def get_trainer(name: str) -> Any:
    """The trainer of a name.

    Raises:
      ValueError: If there is none, with the known names.
    """
    return TRAINERS.find(name) or native.TRAINERS.find(name) or TRAINERS.get_known(name, native.TRAINERS)


def get_pipeline(name: str) -> Any:
    """The pipeline of a name; raises as `get_trainer` does."""
    return PIPELINES.find(name) or native.PIPELINES.find(name) or PIPELINES.get_known(name, native.PIPELINES)


def get_orchestrator(name: str) -> Any:
    """The orchestrator of a name; raises as `get_trainer` does."""
    return ORCHESTRATORS.get_known(name)


def _decorator(name: Any, table_of: Callable[[type], Registry[Any]]) -> Any:
    if isinstance(name, str):

        def decorate(cls: Class) -> Class:
            table_of(cls).add(name, cls)
            return cls

        return decorate
    table_of(name).add(name.__name__, name)
    return name
