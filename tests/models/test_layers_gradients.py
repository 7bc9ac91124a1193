# SPDX-License-Identifier: Apache-2.0
"""The hand-written gradient of a projection's product."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models.layers import contract

# Rows, inputs and outputs of the four kinds of projection: MLP, queries, attention's output, a single vector.
SHAPES = [((2, 3), (4,), (5,)), ((2, 3), (4,), (2, 3)), ((2, 3), (2, 4), (5,)), ((), (4,), (5,))]


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_gradients_are_the_derived_ones(
    rows: tuple[int, ...], inputs: tuple[int, ...], outputs: tuple[int, ...]
) -> None:
    x_key, kernel_key, g_key = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(x_key, (*rows, *inputs))
    kernel = jax.random.normal(kernel_key, (*inputs, *outputs))
    g = jax.random.normal(g_key, (*rows, *outputs))

    def derived(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jnp.tensordot(x, kernel, len(inputs))

    y, gradients = jax.vjp(lambda x, kernel: contract(x, kernel, len(inputs)), x, kernel)
    expected_y, expected = jax.vjp(derived, x, kernel)
    for got, wanted in zip((y, *gradients(g)), (expected_y, *expected(g)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_the_gradient_of_the_kernel_is_not_transposed() -> None:
    x, kernel = jnp.ones((2, 3, 4)), jnp.ones((4, 5))
    jaxpr = jax.make_jaxpr(jax.grad(lambda kernel: jnp.sum(jnp.sin(contract(x, kernel, 1)))))(kernel)
    products = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    assert products[-1].outvars[0].aval.shape == (4, 5)
    assert jaxpr.jaxpr.outvars == [products[-1].outvars[0]]
