# SPDX-License-Identifier: Apache-2.0
"""Value heads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models.heads import ValueHead, init_value_head


@pytest.mark.parametrize("kind", ["mlp", "linear"])
def test_lore_4_6_a_fresh_critic_says_zero_and_can_learn(kind):
    hidden = 50 * jax.random.normal(jax.random.key(0), (4, 7, 16))
    params = init_value_head(kind, 16, jax.random.key(1))
    np.testing.assert_array_equal(ValueHead(kind).apply({"params": params}, hidden), jnp.zeros((4, 7)))
    gradient = jax.grad(lambda p: jnp.square(ValueHead(kind).apply({"params": p}, hidden) - 1).sum())(params)
    assert float(jnp.abs(gradient["out"]["kernel"]).max()) > 0


def test_mlp_golden():
    # D = 1, 2D = 2: relu([1·2 + 0, −1·2 + 1]) = [2, 0]; 3·2 + 5·0 − 1 = 5.
    params = {
        "hidden": {"kernel": jnp.array([[1.0, -1.0]]), "bias": jnp.array([0.0, 1.0])},
        "out": {"kernel": jnp.array([[3.0], [5.0]]), "bias": jnp.array([-1.0])},
    }
    assert ValueHead("mlp").apply({"params": params}, jnp.array([[2.0]])).tolist() == [5.0]


def test_values_are_float32_under_bfloat16_hidden_states():
    params = init_value_head("mlp", 16, jax.random.key(1))
    values = ValueHead("mlp").apply({"params": params}, jnp.ones((2, 16), jnp.bfloat16))
    assert values.dtype == jnp.float32 and values.shape == (2,)


def test_unknown_kind_is_named():
    with pytest.raises(ValueError, match="`value_head` must be one of mlp, linear or None, got 'cubic'"):
        init_value_head("cubic", 16, jax.random.key(0))
