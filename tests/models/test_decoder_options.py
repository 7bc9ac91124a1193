# SPDX-License-Identifier: Apache-2.0
"""Options of the decoder that few families share, by hand: norms, sinks, scales, gates and layouts of tensors."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models.attention import attend, full_context
from jrl.models.blocks import make_block
from jrl.models.config import ClampedGlu, Experts, QueryGrowth, Rope
from jrl.models.experts import clamped_glu, mix_experts, plain_glu, route
from jrl.models.families import base
from jrl.models.fused_attention import choose_attention
from jrl.models.layers import ACTIVATIONS, Norm
from jrl.models.positions import rotations
from jrl.models.score_blocks import Operands
from jrl.models.transformer import Decoder
from tests.models.test_blocks import BASE


def norm(kind, x, **params):
    shape = jnp.shape(params["scale"])
    module = Norm(kind, 0.0, shape, jnp.float32, num_axes=1)
    return np.asarray(module.apply({"params": params}, jnp.asarray(x)))


def test_a_norm_without_a_scale():
    module = Norm("rms_no_scale", 0.0, (2,), jnp.float32)
    assert module.init(jax.random.key(0), jnp.ones((1, 2))) == {}
    np.testing.assert_allclose(module.apply({}, jnp.array([[3.0, 4.0]])), [[3.0, 4.0]] / np.sqrt(12.5))


def test_norms_without_a_bias_and_by_one_plus_scale():
    # Mean 2, deviations −1 and 1: variance 1.
    x, scale = [[1.0, 3.0]], jnp.array([2.0, 5.0])
    np.testing.assert_allclose(norm("layer_no_bias", x, scale=scale), [[-2.0, 5.0]])
    np.testing.assert_allclose(
        norm("layer_plus_one", x, scale=scale, bias=jnp.array([0.5, 0.25])), [[-2.5, 6.25]]
    )


def test_a_norm_with_scales_of_its_own_for_every_head_normalises_each_alone():
    x = [[[1.0, 3.0], [10.0, 30.0]]]
    scale = jnp.array([[1.0, 1.0], [2.0, 3.0]])
    np.testing.assert_allclose(norm("layer_no_bias", x, scale=scale), [[[-1.0, 1.0], [-2.0, 3.0]]])


def test_squared_relu():
    assert ACTIVATIONS["relu2"](jnp.array([-2.0, 3.0])).tolist() == [0.0, 9.0]


def test_a_sink_takes_its_share_and_gives_nothing():
    # Three keys with score 0 and a sink of log 3: each key has 1/6 of the weight, the sink one half.
    q, k = jnp.ones((1, 1, 1, 1)), (jnp.zeros((1, 1, 3, 1)),)
    v = (jnp.array([6.0, 12.0, 24.0]).reshape(1, 1, 3, 1),)
    operands = Operands(q, k, v, jnp.ones((1, 1, 3), bool))
    out = attend(operands, scale=1.0, sinks=jnp.array([math.log(3.0)]))
    assert float(out[0, 0, 0, 0]) == pytest.approx((6 + 12 + 24) / 6)
    plain = attend(operands, scale=1.0)
    assert float(plain[0, 0, 0, 0]) == pytest.approx((6 + 12 + 24) / 3)


def test_a_sink_of_minus_infinity_is_none_and_no_kernel_serves_one():
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (2, 3, 5, 4)) for key in keys)
    operands = Operands(q.swapaxes(1, 2), (k,), (v,), jnp.ones((2, 5, 5), bool))
    with_sink = attend(operands, scale=0.5, sinks=jnp.full(3, -1e30))
    np.testing.assert_allclose(with_sink, attend(operands, scale=0.5), atol=1e-6)
    with pytest.raises(ValueError, match="the model has attention sinks"):
        choose_attention("xla", replace(BASE, attention_sinks=True), jnp.float32)


def test_queries_grow_with_the_logarithm_of_their_step():
    rope = Rope(1e4, query_growth=QueryGrowth(0.5, 4))
    layer = replace(BASE.layers[0], rope=rope)
    (rotation,) = rotations(replace(BASE, layers=(layer,)), jnp.array([[0, 3, 4, 11]]))
    grown = [1.0, 1.0, 1 + 0.5 * math.log(2), 1 + 0.5 * math.log(3)]
    np.testing.assert_allclose(rotation.growth, [grown], rtol=1e-6)


def test_a_layer_that_rotates_nothing_may_let_its_queries_grow():
    rope = Rope(1.0, dim=0, query_growth=QueryGrowth(0.5, 4, first=1))
    config = replace(BASE, layers=(replace(BASE.layers[0], rope=rope),))
    (rotation,) = rotations(config, jnp.array([[0, 2, 3, 11]]))
    assert rotation.cos.shape == (1, 4, 0) and not rope.rotates
    grown = [1.0, 1.0, 1 + 0.5 * math.log(2), 1 + 0.5 * math.log(4)]
    np.testing.assert_allclose(rotation.growth, [grown], rtol=1e-6)
    assert repr(QueryGrowth(0.5, 4)) == "QueryGrowth(rate=0.5, length=4)"


def test_a_query_reads_its_own_chunk_wherever_the_padding_stands():
    config = replace(BASE, layers=(replace(BASE.layers[0], chunk=3), BASE.layers[0]))
    mask = jnp.arange(7)[None] >= 2
    (chunked, whole) = full_context(config, mask, jnp.array([[0, 0, 0, 1, 2, 3, 4]])).masks
    assert config.reaches == ((None, 3), (None, None))
    # Positions 3 and 4 are the second chunk.
    assert chunked[0].sum(-1)[2:].tolist() == [1, 2, 3, 1, 2]
    assert whole[0].sum(-1)[2:].tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="layers that read a row chunk by chunk"):
        choose_attention("xla", config, jnp.float32)


def test_scales_of_logits_and_of_what_sublayers_add():
    hidden, params = jnp.ones((2, 32)), {"embed": {"embedding": jnp.ones((128, 32))}}

    def logits(**options):
        config = replace(BASE, tie_embeddings=True, **options)
        return Decoder(config).apply({"params": params}, hidden, method="logits")[:, :97]

    np.testing.assert_allclose(logits(logit_scale=0.25), 0.25 * logits())
    # The cap is of the scaled logits.
    np.testing.assert_allclose(logits(logit_scale=0.25, logit_softcap=4.0), 4 * np.tanh(8.0 / 4), rtol=1e-6)

    block = make_block(replace(BASE, residual_scale=0.5), BASE.layers[0], jnp.float32)
    added = block.apply({}, jnp.ones((1, 1, 32)), 4.0 * jnp.ones((1, 1, 32)), method="add")
    np.testing.assert_allclose(added, 3.0)


def test_the_gate_of_an_expert_is_clamped():
    glu = clamped_glu(ClampedGlu(sharpness=1.5, limit=2.0))
    # Gate 5 → 2 and up −3 → −2; a gate below −limit stays.
    expected = [2 / (1 + math.exp(-3.0)) * -1, -4 / (1 + math.exp(6.0)) * 1.5]
    np.testing.assert_allclose(glu(jnp.array([5.0, -4.0]), jnp.array([-3.0, 0.5])), expected, rtol=1e-5)


def test_experts_add_the_biases_of_those_that_were_chosen():
    ones = jnp.ones((2, 1, 1))
    biases = [jnp.array([[[1.0]], [[2.0]]]), jnp.array([[[10.0]], [[20.0]]])]
    chosen = jnp.array([[[1], [0]]])
    out = mix_experts(
        jnp.array([[[3.0], [4.0]]]), jnp.ones((1, 2, 1)), chosen, ones, ones, ones, *biases,
        glu=plain_glu(lambda gate: gate),
    )  # fmt: skip
    assert out[0, :, 0].tolist() == [(3 + 2) * (3 + 20), (4 + 1) * (4 + 10)]


def test_a_weight_may_scale_what_an_expert_reads():
    x, ones = jnp.array([[[3.0]]]), jnp.ones((2, 1, 1))
    kernels = (ones, 2 * ones, ones * jnp.array([1.0, 10.0])[:, None, None])

    def mixed(**options):
        weights, chosen = jnp.array([[[0.5, 0.25]]]), jnp.array([[[0, 1]]])
        glu = plain_glu(lambda gate: gate)
        return float(mix_experts(x, weights, chosen, *kernels, glu=glu, **options)[0, 0, 0])

    # Gate and up both read the scaled token: the weight counts twice.
    assert mixed(scale_inputs=True) == pytest.approx(0.5**2 * 18 + 0.25**2 * 180)
    assert mixed() == pytest.approx(0.5 * 18 + 0.25 * 180)


def test_sigmoids_without_a_bias_choose_by_the_scores():
    # Both sigmoids are 1 in float32.
    experts = Experts(3, 1, 4, False, scoring="sigmoid", scale_inputs=True)
    weights, chosen = route(jnp.array([[[40.0, 50.0, 0.0]]]), experts)
    assert (weights.tolist(), chosen.tolist()) == ([[[1.0]]], [[[1]]])


def test_an_expert_that_all_tokens_share_is_gated_by_the_token():
    experts = Experts(2, 1, 3, True, shared_width=5, shared_gate=True)
    config = replace(BASE, gated_mlp=True, activation="relu", mlp_bias=False)
    block = make_block(config, replace(BASE.layers[0], experts=experts), jnp.float32)
    x = jax.random.normal(jax.random.key(0), (1, 2, 32))
    stacked = {"gate": jnp.zeros((2, 32, 3)), "up": jnp.zeros((2, 32, 3)), "down": jnp.zeros((2, 3, 32))}
    keys = jax.random.split(jax.random.key(1), 4)
    gate, up, down, one = (
        jax.random.normal(key, shape)
        for key, shape in zip(keys, ((32, 5), (32, 5), (5, 32), (32, 1)), strict=True)
    )
    params = {
        "experts": stacked | {"router": {"kernel": jnp.zeros((32, 2))}},
        "shared_mlp": {"gate": {"kernel": gate}, "up": {"kernel": up}, "down": {"kernel": down}},
        "shared_gate": {"kernel": one},
    }
    expected = jax.nn.sigmoid(x @ one) * ((jax.nn.relu(x @ gate) * (x @ up)) @ down)
    found = block.apply({"params": params}, x, x, method="feed_forward")
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_fused_heads_come_by_key_value_head():
    # Four queries and two keys of width 1: the queries of the first key, it and its value, then those of the second.
    numbers = np.arange(8.0)
    shapes = [(4, 1), (2, 1), (2, 1)]
    q, k, v = base.vector_by_head().load(numbers, shapes)
    assert (q.ravel().tolist(), k.ravel().tolist(), v.ravel().tolist()) == ([0, 1, 4, 5], [2, 6], [3, 7])
    assert base.vector_by_head().save([q, k, v], 0).tolist() == numbers.tolist()
    weights = base.linear_by_head().load(numbers[:, None], [(1, *shape) for shape in shapes])
    assert [part.ravel().tolist() for part in weights] == [[0, 1, 4, 5], [2, 6], [3, 7]]


def test_halves_of_columns_are_two_parameters():
    tensor = np.arange(8.0).reshape(2, 4)
    parts = base.halves().load(tensor, [(2, 2)] * 2)
    assert [part.tolist() for part in parts] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    np.testing.assert_array_equal(base.halves().save(parts, 0), tensor)


def test_even_and_odd_columns_are_two_parameters():
    tensor = np.arange(8.0).reshape(2, 4)
    parts = base.interleaved().load(tensor, [(2, 2)] * 2)
    assert [part.tolist() for part in parts] == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    np.testing.assert_array_equal(base.interleaved().save(parts, 0), tensor)
