# SPDX-License-Identifier: Apache-2.0
"""Names of trainers, pipelines and methods, and what they stand for: the only look-up by name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from jrl import built_in
from jrl.data.prompts import PromptSet
from jrl.learners.config import MethodConfig
from jrl.suggestions import did_you_mean

if TYPE_CHECKING:
    from jrl.trainers.base import Trainer

Base = TypeVar("Base")
Class = TypeVar("Class", bound=type)


class Registry(Mapping[str, type[Base]], Generic[Base]):
    """Name → class, in lower case; reads like a dictionary.

    Args:
      field: Dotted field of the configuration that names an entry, for errors.
      prefix: Stands before a name for the same entry, as trlX's `Accelerate`.
      suffix: May be left out at the end of a name, as the `Config` of a method.
      base: What a class must derive from; None where its user checks that.
      built_in: Name → module that registers it, imported when the name is first looked up.
    """

    def __init__(
        self,
        field: str,
        *,
        prefix: str = "",
        suffix: str = "",
        base: type[Base] | None = None,
        built_in: Mapping[str, str] | None = None,
    ) -> None:
        self._field, self._prefix, self._suffix, self._base = field, prefix.lower(), suffix.lower(), base
        self._modules = {name.lower(): module for name, module in (built_in or {}).items()}
        self._classes: dict[str, type[Base]] = {}
        self._spelled = {name.lower(): name for name in built_in or {}}

    def __getitem__(self, name: str) -> type[Base]:
        found = self._held(name)
        if found is None:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._spelled)

    def __len__(self) -> int:
        return len(self._spelled)

    def _held(self, key: str) -> type[Base] | None:
        """The class of a name in lower case; a built-in one's module registers it now."""
        if key not in self._classes and key in self._modules:
            importlib.import_module(self._modules[key])
        return self._classes.get(key)

    def add(self, name: str, entry: type[Base]) -> None:
        """Makes a class known. The same class defined anew, as in a notebook's cell, replaces the old one.

        Raises:
          ValueError: If another class holds the name.
          TypeError: If the class does not derive from what it must.
        """
        if self._base is not None and not issubclass(entry, self._base):
            raise TypeError(
                f"`{self._field}`: {entry.__name__} must be a subclass of {_dotted(self._base)} to be registered."
            )
        held = self._held(name.lower())
        if held is not None and _origin(held) != _origin(entry):
            raise ValueError(
                f"`{self._field}`: the name {name!r} belongs to {_dotted(held)}; register {_dotted(entry)} under "
                "another one."
            )
        self._classes[name.lower()], self._spelled[name.lower()] = entry, name

    def find(self, name: str) -> type[Base] | None:
        """The class of a name, or None; case, the prefix and the suffix do not matter."""
        key = name.lower()
        for spelling in (key, key.removeprefix(self._prefix)):
            for full in (spelling, spelling + self._suffix, spelling.removesuffix(self._suffix)):
                found = self._held(full)
                if found is not None:
                    return found
        return None

    def get_known(self, name: str, *others: Registry[Any]) -> type[Base]:
        """The class of a name.

        Args:
          name: As the configuration has it.
          *others: Registries in which the caller looked too, for the error.
        Raises:
          ValueError: Naming the field, what was given, all that is registered, and what is closest.
        """
        found = self.find(name)
        if found is not None:
            return found
        spelled = dict(self._spelled)
        for other in others:
            spelled = other._spelled | spelled
        hint = did_you_mean(name, spelled.values())
        known = ", ".join(sorted(spelled.values()))
        raise ValueError(f"`{self._field}` must be one of {known}, got {name!r}.{hint}")

    @overload
    def register(self, entry: Class) -> Class: ...
    @overload
    def register(self, entry: str) -> Callable[[Class], Class]: ...
    def register(self, entry: Class | str) -> Class | Callable[[Class], Class]:
        """Class decorator, bare or with a name: `@register` takes the class's own, `@register("name")` that one."""
        if isinstance(entry, str):
            name = entry

            def decorate(cls: Class) -> Class:
                self.add(name, cls)
                return cls

            return decorate
        self.add(entry.__name__, entry)
        return entry


def _dotted(entry: type) -> str:
    return f"{entry.__module__}.{entry.__qualname__}"


def _origin(entry: type) -> tuple[str, str]:
    """Source of a class: a script that runs as `__main__` may also be imported under its own name."""
    module = sys.modules.get(entry.__module__)
    file = vars(module).get("__file__") if module is not None else None
    return file or entry.__module__, entry.__qualname__


METHODS: Registry[MethodConfig] = Registry(
    "method.name", suffix="Config", base=MethodConfig, built_in=built_in.METHODS
)
TRAINERS: Registry[Trainer] = Registry("train.trainer", prefix="Accelerate", built_in=built_in.TRAINERS)
PIPELINES: Registry[PromptSet] = Registry("train.pipeline", base=PromptSet)

register_method = METHODS.register
register_trainer = TRAINERS.register
register_pipeline = PIPELINES.register

get_method = METHODS.get_known
get_trainer = TRAINERS.get_known
get_pipeline = PIPELINES.get_known


def method_of_trainer(trainer: str) -> type[MethodConfig] | None:
    """The config class that bears a trainer's name: `PPOConfig` of `PPOTrainer`; None where there is none."""
    return METHODS.find(trainer.lower().removeprefix("accelerate").removesuffix("trainer"))


register_pipeline("PromptPipeline")(PromptSet)
