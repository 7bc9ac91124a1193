# SPDX-License-Identifier: Apache-2.0
"""Checks on static information (shapes, dtypes, Python numbers): made while tracing, they cost no run time.

Each message says which argument, what was expected, what came, and the likely cause.

Reference: none; no arithmetic.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

Scalar = int | float | Float[Array, ""]
"""A hyperparameter: a Python number, or a traced scalar where a sweep or a controller moves it."""


def check_array(name: str, array: Any) -> None:
    """Raises TypeError unless the argument is an array: what a list or a number is broadcast to is anyone's guess.

    Args:
      name: Argument that is checked, as the message calls it.
      array: Its value.
    Raises:
      TypeError: If it has no shape and no dtype.
    Example:
      >>> check_array("values", [1.0, 2.0])
      Traceback (most recent call last):
      TypeError: `values` must be an array, got list. Convert it with `jnp.asarray`.
    """
    if not (hasattr(array, "shape") and hasattr(array, "dtype")):
        raise TypeError(
            f"`{name}` must be an array, got {type(array).__name__}. Convert it with `jnp.asarray`."
        )


def check_same_shape(
    name: str, array: Shaped[Array, "..."], like: str, reference: Shaped[Array, "..."]
) -> None:
    """Raises ValueError unless `array` (argument `name`) has the shape of `reference` (argument `like`).

    Args:
      name: Argument that is checked, as the message calls it.
      array: Its value.
      like: Argument that it must match.
      reference: Value of that one.
    Raises:
      ValueError: If the shapes differ.
      TypeError: If either is not an array.
    Example:
      >>> check_same_shape("values", jnp.zeros((2, 3)), "rewards", jnp.zeros((3, 2)))
      Traceback (most recent call last):
      ValueError: `values` must have shape (3, 2) like `rewards`, got (2, 3).
    """
    check_array(name, array)
    check_array(like, reference)
    if array.shape == reference.shape:
        return
    hint = ""
    if array.ndim == reference.ndim and array.shape[:-1] == reference.shape[:-1]:
        difference = array.shape[-1] - reference.shape[-1]
        if difference == 1:
            hint = " Is a bootstrap value or an unshifted column still attached?"
        elif difference == -1:
            hint = " Was it shifted twice? Only `jrl.ops.alignment` shifts."
    elif array.shape == reference.shape[:-1]:
        hint = " One number a row: does it need `place_scores` first?"
    raise ValueError(f"`{name}` must have shape {reference.shape} like `{like}`, got {array.shape}.{hint}")


def check_mask(mask: Shaped[Array, "..."], *, name: str = "mask") -> None:
    """Raises TypeError unless the mask is boolean: 0/1 numbers would index, add and invert differently.

    Args:
      mask: Of any shape.
      name: Argument that is checked, as the message calls it.
    Raises:
      TypeError: If the dtype is not bool.
    Example:
      >>> check_mask(jnp.ones(2))
      Traceback (most recent call last):
      TypeError: `mask` must be bool, got float32. Convert a 0/1 mask with `mask != 0`.
    """
    check_array(name, mask)
    if mask.dtype != jnp.bool_:
        raise TypeError(f"`{name}` must be bool, got {mask.dtype}. Convert a 0/1 mask with `{name} != 0`.")


def check_same_floats(
    name: str, array: Shaped[Array, "..."], like: str, reference: Shaped[Array, "..."]
) -> None:
    """`check_same_shape` of two arrays that both must hold floating-point numbers.

    Args:
      name: Argument that is checked, as the message calls it.
      array: Its value.
      like: Argument that it must match.
      reference: Value of that one.
    Raises:
      ValueError: If the shapes differ.
      TypeError: If either is not an array, or not of a float dtype.
    Example:
      >>> check_same_floats("values", jnp.zeros(2), "rewards", jnp.arange(2))
      Traceback (most recent call last):
      TypeError: `rewards` must be of a float dtype, got int32. Are these token ids? Else convert it with `.astype`.
    """
    check_float(like, reference)
    check_float(name, array)
    check_same_shape(name, array, like, reference)


def check_float(name: str, array: Shaped[Array, "..."]) -> None:
    """Raises TypeError unless the array holds floating-point numbers: ids in place of logits would compute something.

    Args:
      name: Argument that is checked, as the message calls it.
      array: Its value.
    Raises:
      TypeError: If the dtype is an integer's, boolean or complex.
    Example:
      >>> check_float("logits", jnp.arange(2))
      Traceback (most recent call last):
      TypeError: `logits` must be of a float dtype, got int32. Are these token ids? Else convert it with `.astype`.
    """
    check_array(name, array)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        is_integer = jnp.issubdtype(array.dtype, jnp.integer)
        hint = " Are these token ids? Else convert it with `.astype`." if is_integer else ""
        raise TypeError(f"`{name}` must be of a float dtype, got {array.dtype}.{hint}")


def check_integer(name: str, array: Shaped[Array, "..."]) -> None:
    """Raises TypeError unless the array holds whole numbers: ids in a float dtype are rounded from 2²⁴ on.

    Args:
      name: Argument that is checked, as the message calls it.
      array: Its value.
    Raises:
      TypeError: If the dtype is a float's, boolean or complex.
    Example:
      >>> check_integer("targets", jnp.zeros(2))
      Traceback (most recent call last):
      TypeError: `targets` must be of an integer dtype, got float32.
    """
    check_array(name, array)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"`{name}` must be of an integer dtype, got {array.dtype}.")


def check_positive(name: str, value: Scalar) -> None:
    """Raises ValueError if a Python number is not > 0; a traced scalar cannot be looked at and passes.

    Args:
      name: Argument that is checked, as the message calls it.
      value: Its value.
    Raises:
      ValueError: If a Python number is 0 or less.
    Example:
      >>> check_positive("clip_range", 0.0)
      Traceback (most recent call last):
      ValueError: `clip_range` must be > 0, got 0.0.
    """
    if isinstance(value, int | float) and not value > 0:
        raise ValueError(f"`{name}` must be > 0, got {value}.")


def check_share(name: str, value: Scalar) -> None:
    """Raises ValueError if a Python number is not in [0, 1]; a traced scalar cannot be looked at and passes.

    Args:
      name: Argument that is checked, as the message calls it.
      value: Its value.
    Raises:
      ValueError: If a Python number lies outside.
    Example:
      >>> check_share("gamma", 2.0)
      Traceback (most recent call last):
      ValueError: `gamma` must be in [0, 1], got 2.0.
    """
    if isinstance(value, int | float) and not 0 <= value <= 1:
        raise ValueError(f"`{name}` must be in [0, 1], got {value}.")


def check_batch(mask: Shaped[Array, "..."], *, name: str = "mask", **arrays: Shaped[Array, "..."]) -> None:
    """Raises unless `mask` is boolean and every array, named as the caller's argument, holds floats in its shape.

    Args:
      mask: True on the positions that count.
      name: Argument of the caller that the mask is, as the message calls it.
      arrays: Values by the name of the caller's argument.
    Raises:
      ValueError: If an array has another shape than the mask.
      TypeError: If the mask is not boolean, or anything else is no array of a float dtype.
    Example:
      >>> check_batch(jnp.ones((2, 3), bool), values=jnp.zeros((3, 3)))
      Traceback (most recent call last):
      ValueError: `values` must have shape (2, 3) like `mask`, got (3, 3).
    """
    check_mask(mask, name=name)
    for label, array in arrays.items():
        check_float(label, array)
        check_same_shape(label, array, name, mask)
