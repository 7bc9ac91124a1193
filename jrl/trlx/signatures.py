# SPDX-License-Identifier: Apache-2.0
"""Constructors with the seed's arguments, order and defaults, for classes whose fields are jrl's."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from jrl.suggestions import did_you_mean

Class = TypeVar("Class", bound=type)
Arguments = Mapping[str, Any]


class OldSection:
    """A section of the first releases: it holds what it was given until a `TRLConfig` translates it."""

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({values})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    __hash__ = None  # type: ignore[assignment]


def takes(*required: str, **defaults: Any) -> Callable[[Class], Class]:
    """Class decorator: the constructor takes these arguments, by position or by name.

    On a dataclass, its other fields are taken by name too, and every default is copied.

    Args:
      *required: Names without a default, in order.
      **defaults: Names with theirs, in order.
    """

    def decorate(cls: Class) -> Class:
        signature = _signature(required, defaults)
        native: Any = cls.__mro__[1]
        own = _field_names(cls)

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            more = {name: kwargs.pop(name) for name in own & kwargs.keys() - signature.parameters.keys()}
            values = bind(cls.__name__, signature, own, args, kwargs)
            if issubclass(cls, OldSection):
                vars(self).update(values)
            else:
                native.__init__(self, **values, **more)

        set_signature(cls, "__init__", __init__, signature)
        return cls

    return decorate


def also_takes(old: type[OldSection], told_by: Callable[[Arguments], bool]) -> Callable[[Class], Class]:
    """Class decorator: arguments of the first releases make an object of `old`.

    They are told by a name that only `old` has; or else they fit `old`, and `told_by` holds for them.
    """

    def decorate(cls: Class) -> Class:
        signature, old_signature = inspect.signature(cls), inspect.signature(old)
        only_old = old_signature.parameters.keys() - _field_names(cls)

        def is_old(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
            if only_old & kwargs.keys():
                return True
            try:
                bound = old_signature.bind(*args, **kwargs)
            except TypeError:
                return False
            return told_by(bound.arguments)

        def __new__(made: Any, *args: Any, **kwargs: Any) -> Any:
            if made is cls and is_old(args, kwargs):
                return old(*args, **kwargs)
            return object.__new__(made)

        set_signature(cls, "__new__", __new__, signature)
        return cls

    return decorate


def defaults_of(cls: type) -> dict[str, Any]:
    """Argument → default of a constructor, copied; those without one are left out."""
    parameters = inspect.signature(cls).parameters.values()
    return {p.name: copy.deepcopy(p.default) for p in parameters if p.default is not p.empty}


def bind(
    name: str, signature: inspect.Signature, known: set[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Argument → value, with copies of the defaults.

    Raises:
      TypeError: Naming all arguments that are missing, or an unknown one and the closest known.
    """
    parameters = signature.parameters
    for given in kwargs:
        if given not in parameters:
            near = did_you_mean(given, known | parameters.keys())
            raise TypeError(f"{name}: unknown argument `{given}`.{near}")
    partial = signature.bind_partial(*args, **kwargs)
    missing = [
        p.name for p in parameters.values() if p.default is p.empty and p.name not in partial.arguments
    ]
    if missing:
        raise TypeError(f"{name}: the arguments {missing} are required.")
    partial.apply_defaults()
    return {
        key: copy.deepcopy(value) if value is parameters[key].default else value
        for key, value in partial.arguments.items()
    }


def set_signature(cls: type, name: str, method: Callable[..., Any], signature: inspect.Signature) -> None:
    """Sets a constructor, and the signature that tools read; on the function, so that subclasses do not inherit it."""
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    method.__signature__ = signature.replace(parameters=[first, *signature.parameters.values()])  # type: ignore[attr-defined]
    method.__qualname__ = f"{cls.__qualname__}.{name}"
    setattr(cls, name, method)


def _field_names(cls: type) -> set[str]:
    return {field.name for field in fields(cls)} if is_dataclass(cls) else set()


def _signature(required: tuple[str, ...], defaults: Mapping[str, Any]) -> inspect.Signature:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature(
        [inspect.Parameter(name, kind) for name in required]
        + [inspect.Parameter(name, kind, default=value) for name, value in defaults.items()]
    )
