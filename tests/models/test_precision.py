# SPDX-License-Identifier: Apache-2.0
"""Whether float32 means float32: accelerators round factors to TF32 or bfloat16 unless they are told not to."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

from tests.tiny import tiny_lm


def products(jaxpr: Any) -> Iterator[Any]:
    """All matrix products of a program, those inside loops and calls too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from products(inner)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_lore_2_13_a_precision_that_is_asked_for_reaches_every_product(family):
    lm, params = tiny_lm(family)
    tokens = jnp.arange(8, dtype=jnp.int32)[None]
    with jax.default_matmul_precision("highest"):
        found = list(products(jax.make_jaxpr(lm.logits)(params, tokens).jaxpr))
    assert len(found) >= 2 * (6 if family == "gpt2" else 7) + 1
    highest = jax.lax.Precision.HIGHEST
    for equation in found:
        assert equation.params["precision"] == (highest, highest), equation
