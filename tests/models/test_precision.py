# SPDX-License-Identifier: Apache-2.0
"""Whether float32 means float32: accelerators round factors to TF32 or bfloat16 unless they are told not to."""

import re

import jax
import jax.numpy as jnp
import pytest

from tests.tiny import tiny_lm


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_lore_2_13_a_precision_that_is_asked_for_reaches_every_product(family):
    lm, params = tiny_lm(family)
    tokens = jnp.arange(8, dtype=jnp.int32)[None]
    with jax.default_matmul_precision("highest"):
        program = jax.jit(lm.logits).lower(params, tokens).as_text()  # primitives hide products from a jaxpr
    found = re.findall(r"stablehlo\.dot_general.*", program)
    assert len(found) >= 2 * (6 if family == "gpt2" else 7) + 1
    for product in found:
        assert "precision = [HIGHEST, HIGHEST]" in product
