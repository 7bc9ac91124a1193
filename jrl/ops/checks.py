# SPDX-License-Identifier: Apache-2.0
"""Checks on static information (shapes, dtypes, Python numbers): made while tracing, they cost no run time.

Each message says which argument, what was expected, what came, and the likely cause.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

Scalar = int | float | Float[Array, ""]
"""A hyperparameter: a Python number, or a traced scalar where a sweep or a controller moves it."""


def check_same_shape(
    name: str, array: Shaped[Array, "..."], like: str, reference: Shaped[Array, "..."]
) -> None:
    """Raises ValueError unless `array` (argument `name`) has the shape of `reference` (argument `like`)."""
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
    """Raises TypeError unless the mask is boolean: 0/1 numbers would index, add and invert differently."""
    if mask.dtype != jnp.bool_:
        raise TypeError(f"`{name}` must be bool, got {mask.dtype}. Convert a 0/1 mask with `{name} != 0`.")


def check_positive(name: str, value: Scalar) -> None:
    """Raises ValueError if a Python number is not > 0; a traced scalar cannot be looked at and passes."""
    if isinstance(value, int | float) and not value > 0:
        raise ValueError(f"`{name}` must be > 0, got {value}.")


def check_batch(mask: Shaped[Array, "..."], **arrays: Shaped[Array, "..."]) -> None:
    """Raises unless `mask` is boolean and every array, named as the caller's argument, has its shape."""
    check_mask(mask)
    for name, array in arrays.items():
        check_same_shape(name, array, "mask", mask)
