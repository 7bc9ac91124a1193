# SPDX-License-Identifier: Apache-2.0
"""Methods that a script overrides: which they are, calls of them inside a compiled program, and refusals by name.

Every method of a seed's trainer that the seed itself calls is either called by jrl too, or refused where a subclass
brings its own: an override that nobody calls would train something else without a word.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

_FOREIGN = ("torch", "numpy")
_TRACED: ContextVar[str | None] = ContextVar("traced", default=None)
"""Class and name of the script's method that is being traced; None: none is."""


def jrl_class(obj: Any) -> type:
    """jrl's own class of an object whose class a script may have derived."""
    return next(cls for cls in type(obj).__mro__ if _is_jrls(cls.__module__))


def own_methods(obj: Any, base: type, names: Sequence[str]) -> dict[str, Callable[..., Any]]:
    """Methods among `names` that the object's class, or the object itself, overrides.

    A function that a script put on jrl's own class counts, too.

    Args:
      obj: The trainer.
      base: jrl's class.
      names: Of methods of `base`.
    """
    return {
        name: getattr(obj, name)
        for name in names
        if name in vars(obj)
        or getattr(type(obj), name) is not getattr(base, name)
        or _is_foreign(getattr(base, name))
    }


def refuse_overrides(cls: type, base: type, cures: Mapping[str, str]) -> None:
    """Refuses a subclass that defines a method which would not be called, and one that was put on jrl's class.

    Args:
      cls: The subclass.
      base: jrl's class.
      cures: Name of the method, jrl's or the seed's alone → what to do instead.
    Raises:
      TypeError: Naming the method.
    """
    derived = cls.__mro__[: cls.__mro__.index(base)]
    for one in cls.__mro__:
        for name in vars(one).keys() & cures.keys():
            if one in derived or (_is_jrls(one.__module__) and _is_foreign(vars(one)[name])):
                raise TypeError(
                    f"{cls.__name__} must not override `{name}`: nothing here calls it, so it would change nothing. "
                    f"{cures[name]}"
                )


def refuse_assigned(obj: Any, cures: Mapping[str, str]) -> None:
    """Refuses a method that was put on an object and that nothing would call.

    Args:
      obj: The trainer.
      cures: As of `refuse_overrides`.
    Raises:
      TypeError: Naming the method.
    """
    for name in vars(obj).keys() & cures.keys():
        raise TypeError(
            f"`{type(obj).__name__}.{name}` was set, and nothing here calls it, so it would change nothing. "
            f"{cures[name]}"
        )


def _is_jrls(module: str) -> bool:
    return module.partition(".")[0] == "jrl"


def _is_foreign(attribute: Any) -> bool:
    """True for a function, method or property that was written outside jrl."""
    function = getattr(attribute, "fget", None) or getattr(attribute, "__func__", attribute)
    module = getattr(function, "__module__", None)
    return callable(function) and module is not None and not _is_jrls(module)


@contextlib.contextmanager
def tracing(name: str) -> Iterator[None]:
    """Inside, the script's method of this name is traced: see `refuse_while_traced`."""
    token = _TRACED.set(name)
    try:
        yield
    finally:
        _TRACED.reset(token)


def refuse_while_traced(what: str, instead: str = "") -> None:
    """Refuses, inside a script's method that is being traced, what changes from step to step.

    Args:
      what: Attribute or method that is asked for.
      instead: What to do.
    Raises:
      TypeError: Naming the method and the attribute.
    """
    name = _TRACED.get()
    if name is not None:
        raise TypeError(
            f"`{name}` must not use `{what}`: it is compiled once, and what is there would stay that of the first "
            f"step. {instead}".rstrip()
        )


def traced(name: str, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Calls a script's method while a program is traced.

    Args:
      name: Class and method, for errors.
      method: Computes with jax arrays.
      *arguments: Of the method.
      **options: Of the method.
    Raises:
      TypeError: If it meets torch, NumPy or a value that is known only when the program runs.
    """
    try:
        with tracing(name):
            found = method(*arguments, **options)
    except Exception as error:  # of the script: anything may come, and what is not of tracing goes on
        if not _is_of_tracing(error):
            raise
        reason = str(error).strip().splitlines()
        raise TypeError(
            f"`{name}` must compute with jax arrays, since it is compiled into the update, and got stuck: "
            f"{type(error).__name__}: {reason[0] if reason else ''} Compute with jax.numpy (`jrl.ops` has masked "
            "means, GAE, clipped losses; `jrl.trl.core` has TRL's helpers), without `if`, `float()`, `.item()` or "
            "loops over values, and return jax arrays."
        ) from error
    foreign = [x for x in jax.tree.leaves(found) if type(x).__module__.partition(".")[0] == "torch"]
    if foreign:
        raise TypeError(f"`{name}` must return jax arrays, got a {type(foreign[0]).__name__} of torch.")
    return found


def _is_of_tracing(error: Exception) -> bool:
    """True for errors of computing with a traced array as if it had a value, or as if it were torch's."""
    if isinstance(error, jax.errors.JAXTypeError | jax.errors.JAXIndexError):
        return True
    if "Tracer" in str(error) or "ArrayImpl" in str(error):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1].filename.replace("\\", "/") if frames else ""
    return any(f"/site-packages/{library}/" in last for library in _FOREIGN)


def checked_array(name: str, what: str, value: Any, like: Array) -> Array:
    """A returned array as float32.

    Raises:
      ValueError: If it has another shape.
    """
    array = jnp.asarray(value, jnp.float32)
    if array.shape != like.shape:
        raise ValueError(f"`{name}` must return {what} of shape {like.shape}, got {array.shape}.")
    return array


def checked_scalar(name: str, what: str, value: Any) -> Array:
    """A returned number as float32.

    Raises:
      ValueError: If it is an array of several.
    """
    array = jnp.asarray(value, jnp.float32)
    if array.size != 1:
        raise ValueError(
            f"`{name}` must return {what} as one number, a mean over its minibatch, got shape {array.shape}."
        )
    return array.reshape(())
