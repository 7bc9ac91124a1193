# SPDX-License-Identifier: Apache-2.0
"""The products of attention as a CPU computes them, and their gradients."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models.products.cpu import MOST_TOKENS, mix_values, score_keys

ROWS, HEADS, WIDTH = 2, 3, 8
FORMS: dict[str, tuple[Callable[..., jax.Array], Callable[..., jax.Array]]] = {
    "scores": (score_keys, lambda q, k: jnp.einsum("bkmh,bksh->bkms", q, k)),
    "values": (mix_values, lambda w, v: jnp.einsum("bkms,bksh->bkmh", w, v)),
}


def operands(name: str, queries: int, keys: int, dtype: str) -> list[jax.Array]:
    draws = np.random.default_rng(queries)
    first = (ROWS, HEADS, queries, WIDTH if name == "scores" else keys)
    return [jnp.asarray(draws.normal(size=shape), dtype) for shape in (first, (ROWS, HEADS, keys, WIDTH))]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("queries", "keys"), [(10, 10), (5, 12), (1, 7), (64, 64)])
@pytest.mark.parametrize("name", FORMS)
def test_products_and_gradients_are_the_derived_ones(name: str, queries: int, keys: int, dtype: str) -> None:
    """Few scores take the turned form on a CPU, 64 by 64 the other."""
    given = operands(name, queries, keys, dtype)
    ours, einsum = FORMS[name]
    y, gradients = jax.vjp(ours, *given)
    wanted, derived = jax.vjp(einsum, *(part.astype(jnp.float32) for part in given))
    g = jnp.asarray(np.random.default_rng(1).normal(size=y.shape), jnp.float32)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, wanted, atol=1e-5)
    for found, expected, operand in zip(jax.jit(gradients)(g), derived(g), given, strict=True):
        assert found.dtype == operand.dtype and found.shape == operand.shape
        ulp = 2.0**-8 if dtype == "bfloat16" else 1e-5
        np.testing.assert_allclose(np.float32(found), expected, rtol=ulp, atol=1e-5)


@pytest.mark.parametrize(
    ("queries", "keys", "turned"),
    [(MOST_TOKENS, MOST_TOKENS, True), (MOST_TOKENS + 1, 2, False), (2, MOST_TOKENS + 1, False)],
)
def test_an_operand_is_turned_where_matrices_are_small(queries: int, keys: int, turned: bool) -> None:
    given = operands("scores", queries, keys, "float32")
    gradient = jax.make_jaxpr(jax.grad(lambda q, k: score_keys(q, k).sum(), 1))(*given)
    assert ("tuned_product" in str(gradient)) is turned
