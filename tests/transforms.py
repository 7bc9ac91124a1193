# SPDX-License-Identifier: Apache-2.0
"""Holds a function to every transform of JAX: forward mode, `linearize`, and products with the Hessian."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Tree = Any


def normals_like(tree: Tree, seed: int) -> Tree:
    """Standard normal numbers in the shapes of a tree."""
    draws = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(draws.normal(size=x.shape), x.dtype), tree)


def dot(x: Tree, y: Tree) -> jax.Array:
    """⟨x, y⟩ over all leaves."""
    return sum(jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True))


def assert_every_transform(
    f: Callable[[Tree], Tree], x: Tree, *, rtol: float = 1e-4, backwards_twice: bool = True
) -> None:
    """⟨u, J·v⟩ = ⟨Jᵀ·u, v⟩, and w·∂(∇f)·v the same forwards over backwards as backwards over backwards.

    Args:
      f: A tree of float arrays to a tree of float arrays.
      x: Where.
      rtol: Of the products, to the norm of what is multiplied.
      backwards_twice: Whether backwards over backwards is known.
    """
    u, v, w = normals_like(jax.eval_shape(f, x), 1), normals_like(x, 2), normals_like(x, 3)

    def gradient(x: Tree) -> Tree:
        return jax.grad(lambda x: dot(f(x), u))(x)

    def first(x: Tree) -> list[jax.Array]:
        return [dot(u, jax.jvp(f, (x,), (v,))[1]), dot(u, jax.linearize(f, x)[1](v)), dot(gradient(x), v)]

    def second(x: Tree) -> list[jax.Array]:
        forwards = dot(w, jax.jvp(gradient, (x,), (v,))[1])
        if not backwards_twice:
            return [forwards]
        return [forwards, dot(jax.grad(lambda x: dot(gradient(x), w))(x), v)]

    for found, scale in ((first, gradient), (second, lambda x: jax.jvp(gradient, (x,), (v,))[1])):
        numbers, size = jax.jit(lambda x, found=found, scale=scale: (jnp.stack(found(x)), scale(x)))(x)
        atol = rtol * max(float(jnp.sqrt(dot(size, size))), 1.0)
        np.testing.assert_allclose(numbers, np.full_like(numbers, numbers[0]), rtol=rtol, atol=atol)
        assert np.isfinite(numbers).all()


def assert_hessian_products(f: Callable[[Tree], jax.Array], x: Tree, *, step: float, rtol: float) -> None:
    """The same of a scalar function of many weights, in one compiled program: H·v against differences of gradients.

    Args:
      f: Without a stopped gradient, which differences do not see.
      x: Where.
      step: How far apart the gradients are.
      rtol: Of H·v, as its norm goes.
    """
    v = normals_like(x, 2)
    v = jax.tree.map(lambda part: part / jnp.sqrt(dot(v, v)), v)

    @jax.jit
    def products(x: Tree) -> tuple[Tree, Tree, jax.Array]:
        (_, gradient), (forwards, hessian) = jax.jvp(jax.value_and_grad(f), (x,), (v,))
        return gradient, hessian, jnp.stack([dot(gradient, v), forwards, jax.linearize(f, x)[1](v)])

    def moved(by: float) -> Tree:
        return jax.tree.map(lambda a, b: a + by * b, x, v)

    gradient, hessian, slopes = products(x)
    size = float(jnp.sqrt(dot(gradient, gradient)))
    np.testing.assert_allclose(slopes, np.full(3, slopes[0]), atol=1e-4 * size)
    differences = jax.tree.map(
        lambda a, b: (a - b) / (2 * step), products(moved(step))[0], products(moved(-step))[0]
    )
    gap = jax.tree.map(jnp.subtract, differences, hessian)
    sizes = [float(jnp.sqrt(dot(part, part))) for part in (gap, hessian)]
    assert 0 < sizes[1] < np.inf and sizes[0] < rtol * sizes[1], sizes
