# SPDX-License-Identifier: Apache-2.0
"""Products whose gradients take a form of their own, for every transform of JAX.

A product c = a · b and its two gradients belong together: each is what the sum Σ a · b · c leaves when one of the three
is taken away. So the transposes of each are the other two, and derivatives of any order, forwards and backwards, are
these three functions again. `jax.custom_vjp` would end forward mode, and `jax.custom_jvp` cannot say what a
transpose looks like.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float

Forms = tuple[Callable[..., Array], Callable[..., Array], Callable[..., Array]]
"""Of a, b and c: the function that gives it from the other two, in this order, and from what else it needs."""

_product = Primitive("tuned_product")


def multiply(
    forms: Forms, slot: int, x: Float[Array, "..."], y: Float[Array, "..."], *others: Array, dtype: Any = None
) -> Float[Array, "..."]:
    """`forms[slot](x, y, *others)`, differentiated by the other two forms.

    Args:
      forms: The three products.
      slot: Which of a, b and c is wanted.
      x: The first of those that are given.
      y: The second.
      *others: Arrays in which nothing is linear, such as indices: constants.
      dtype: Of the result; None: what the form gives.
    """
    dtype = jax.eval_shape(forms[slot], x, y, *others).dtype if dtype is None else dtype
    found: Array = _product.bind(x, y, *others, forms=forms, slot=slot, dtype=dtype)
    return found


def _run(x: Array, y: Array, *others: Array, forms: Forms, slot: int, dtype: Any) -> Array:
    return forms[slot](x, y, *others).astype(dtype)


def _shape(*operands: Any, **params: Any) -> jax.core.ShapedArray:
    shaped = [jax.ShapeDtypeStruct(operand.shape, operand.dtype) for operand in operands]
    found = jax.eval_shape(functools.partial(_run, **params), *shaped)
    return jax.core.ShapedArray(found.shape, found.dtype)


def _tangent(primals: tuple[Any, ...], tangents: tuple[Any, ...], **params: Any) -> tuple[Array, Any]:
    x, y, *others = primals
    pairs = [(tangents[0], y), (x, tangents[1])]
    terms = [
        _product.bind(*pair, *others, **params)
        for pair in pairs
        if not any(isinstance(part, ad.Zero) for part in pair)
    ]
    return _product.bind(*primals, **params), functools.reduce(ad.add_tangents, terms)


def _transpose(g: Any, x: Any, y: Any, *others: Any, forms: Forms, slot: int, dtype: Any) -> list[Any]:
    del dtype
    given = [index for index in range(3) if index != slot]
    unknown = int(ad.is_undefined_primal(y))
    wanted, known = given[unknown], given[1 - unknown]
    operands = {slot: g, known: x if unknown else y}
    aval = (y if unknown else x).aval
    found = _product.bind(
        *(operands[index] for index in sorted(operands)), *others, forms=forms, slot=wanted, dtype=aval.dtype
    )
    return [None] * unknown + [found] + [None] * (1 - unknown + len(others))


def _batch(operands: tuple[Any, ...], axes: tuple[Any, ...], **params: Any) -> tuple[Array, int]:
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    fronted = [batching.bdim_at_front(x, axis, size) for x, axis in zip(operands, axes, strict=True)]
    return jax.lax.map(lambda one: _product.bind(*one, **params), fronted), 0


_product.def_impl(jax.jit(_run, static_argnames=("forms", "slot", "dtype")))
_product.def_abstract_eval(_shape)
mlir.register_lowering(_product, mlir.lower_fun(_run, multiple_results=False))
ad.primitive_jvps[_product] = _tangent
ad.primitive_transposes[_product] = _transpose
batching.primitive_batchers[_product] = _batch
