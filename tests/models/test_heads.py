# SPDX-License-Identifier: Apache-2.0
"""Value and Q heads."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models.heads import (
    HEADS,
    QHead,
    ValueHead,
    found_heads,
    heads_of,
    init_q_heads,
    init_value_head,
    read_heads,
)
from jrl.ops.logprobs import take_targets
from tests.tiny import VOCAB_SIZE, tiny_lm, tiny_policy


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
    with pytest.raises(ValueError, match="`value_head` must be one of mlp, linear, got 'cubic'"):
        init_value_head("cubic", 16, jax.random.key(0))


class TestQHead:
    """One value an action, in the columns of the padded vocabulary."""

    def test_golden(self):
        # D = 1, 2D = 2: relu([2, −2 + 1]) = [2, 0]; actions 0 and 1: 3·2 + 1 = 7 and 5·2 = 10; column 2 is padding.
        params = {
            "hidden": {"kernel": jnp.array([[1.0, -1.0]]), "bias": jnp.array([0.0, 1.0])},
            "out": {
                "kernel": jnp.array([[3.0, 5.0, 9.0], [7.0, 7.0, 7.0]]),
                "bias": jnp.array([1.0, 0.0, 0.0]),
            },
        }
        values = QHead(2, 3).apply({"params": params}, jnp.array([[2.0]], jnp.bfloat16))
        assert values.dtype == jnp.float32 and values.tolist() == [[7.0, 10.0, -np.inf]]

    @pytest.mark.parametrize("width", [4, 40])
    def test_values_of_actions_are_those_among_all(self, width):
        """With a hidden layer narrower than the vocabulary of 29, and a wider one."""
        params = init_q_heads(1, width, 29, 32, jax.random.key(0))["q_heads"]["0"]
        params = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape), params)
        hidden = jax.random.normal(jax.random.key(1), (3, 5, width))
        outside = jnp.array([-1, -100, 29, 31, 99])
        actions = jax.random.randint(jax.random.key(2), (3, 5), 0, 29).at[0].set(outside)
        head = QHead(29, 32)
        everything = head.apply({"params": params}, hidden)
        some = head.apply({"params": params}, hidden, actions)
        assert some.shape == (3, 5) and some.dtype == jnp.float32
        np.testing.assert_array_equal(some[0], 0)
        np.testing.assert_allclose(some[1:], take_targets(everything, actions)[1:], rtol=1e-5, atol=1e-4)

    def test_values_of_actions_take_no_products_with_the_vocabulary(self):
        params = jax.eval_shape(lambda: init_q_heads(2, 8, 50_000, 50_048, jax.random.key(0)))
        read = jax.make_jaxpr(partial(read_heads, 50_000, 50_048))
        inputs = {"q_heads": params["q_heads"]}, jnp.zeros((3, 4, 8)), jnp.zeros((3, 4), jnp.int32)
        assert "12,50048" not in str(read(*inputs)).replace("3,4,", "12,")
        assert "12,50048" in str(read(*inputs[:2])).replace("3,4,", "12,")

    def test_fresh_heads_say_zero_and_differ_from_each_other_but_not_from_their_targets(self):
        params = init_q_heads(2, 8, 5, 16, jax.random.key(0))
        assert set(params) | {"v_head"} == set(HEADS)
        values = QHead(5, 16).apply({"params": params["q_heads"]["1"]}, jnp.ones((3, 4, 8)))
        assert values.shape == (3, 4, 16)
        np.testing.assert_array_equal(values[..., :5], 0)
        first, second = (params["q_heads"][i]["hidden"]["kernel"] for i in "01")
        assert float(jnp.abs(first - second).max()) > 0.1
        jax.tree.map(np.testing.assert_array_equal, params["q_heads"], params["target_q_heads"])
        buffers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)]
        assert len(set(buffers)) == len(buffers)

    def test_their_number_is_checked(self):
        with pytest.raises(ValueError, match="`num_q_heads` must be 1 or 2, got 3"):
            init_q_heads(3, 8, 5, 16, jax.random.key(0))


class TestReadHeads:
    """What is read is what the parameters hold."""

    def test_only_the_heads_that_are_there(self):
        hidden = jnp.ones((3, 4, 8))
        q_heads = init_q_heads(2, 8, 5, 16, jax.random.key(0))
        value = {"v_head": init_value_head("mlp", 8, jax.random.key(1))}
        shapes = [
            {name: x.shape for name, x in read_heads(5, 16, params, hidden).items()}
            for params in ({}, value, q_heads, value | q_heads)
        ]
        values, q_values = {"values": (3, 4)}, {"q_values": (2, 3, 4, 16)}
        assert shapes == [{}, values, q_values, values | q_values]

    def test_every_head_reads_with_its_own_parameters(self):
        hidden = jax.random.normal(jax.random.key(0), (3, 8))
        params = init_q_heads(2, 8, 5, 16, jax.random.key(1))["q_heads"]
        params = {
            i: {**head, "out": jax.tree.map(lambda x: x + 1, head["out"])} for i, head in params.items()
        }
        q_values = read_heads(5, 16, {"q_heads": params}, hidden)["q_values"]
        for i, head in params.items():
            np.testing.assert_array_equal(q_values[int(i)], QHead(5, 16).apply({"params": head}, hidden))
        assert np.isneginf(q_values[..., 5:]).all() and not np.array_equal(q_values[0], q_values[1])

    @pytest.mark.parametrize("family", ["gpt2", "t5"])
    def test_models_read_theirs(self, family):
        policy, params, frozen, reference = tiny_policy(family, 1, num_q_heads=2)
        config = tiny_lm(family)[0].config
        assert set(HEADS) <= set(params) and not set(HEADS) & (set(frozen) | set(reference))
        q_values = policy.heads(params, jnp.ones((1, config.width)))["q_values"]
        assert q_values.shape == (2, 1, config.padded_vocab_size)
        assert np.isfinite(q_values).sum(axis=-1).tolist() == [[VOCAB_SIZE], [VOCAB_SIZE]]


def test_heads_are_found_by_name():
    assert found_heads(["wte", "h.0.v_head.0.weight"]) == (None, 0)
    assert found_heads(["v_head.2.bias"]) == ("mlp", 0)
    assert found_heads(["v_head.summary.bias"]) == ("linear", 0)
    assert found_heads(["ilql_heads.v_head.0.bias", "ilql_heads.q_heads.1.0.bias"]) == ("mlp", 2)
    linear, mlp = ({"v_head": init_value_head(kind, 4, jax.random.key(0))} for kind in ("linear", "mlp"))
    assert (heads_of({}), heads_of(linear), heads_of(mlp)) == ((None, 0), ("linear", 0), ("mlp", 0))
    assert heads_of(mlp | init_q_heads(2, 4, 5, 16, jax.random.key(0))) == ("mlp", 2)
