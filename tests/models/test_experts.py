# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts equals its dense definition, token by token, whatever stands beside a token."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from transformers import MixtralConfig, Qwen3MoeConfig

from jrl.models.config import Experts
from jrl.models.experts import AdaptedKernels, ExpertsMlp, mix_experts, plain_glu, route
from jrl.models.model import CausalLM
from tests.models.family_cases_moe import CASES, MIXTRAL, QWEN
from tests.models.products.test_blocks import cost

WIDTH, INNER, NUM_EXPERTS = 12, 20, 6


def weights_of_experts():
    """Gate, up and down."""
    keys = jax.random.split(jax.random.key(0), 3)
    wide, narrow = (NUM_EXPERTS, WIDTH, INNER), (NUM_EXPERTS, INNER, WIDTH)
    return [
        0.3 * jax.random.normal(key, shape) for key, shape in zip(keys, (wide, wide, narrow), strict=True)
    ]


def tokens(rows, length, seed=1):
    """A batch, and the router's scores of it."""
    keys = jax.random.split(jax.random.key(seed), 2)
    return jax.random.normal(keys[0], (rows, length, WIDTH)), 2 * jax.random.normal(
        keys[1], (rows, length, NUM_EXPERTS)
    )


def routed(x, scores, gate, up, down, experts):
    weights, chosen = route(scores, experts)
    return mix_experts(x, weights, chosen, gate, up, down, glu=plain_glu(jax.nn.silu))


def dense(x, scores, gate, up, down, experts):
    """By definition: every expert answers every token, and the answers of those not chosen count nothing."""
    weights, chosen = route(scores, experts)
    hidden = jax.nn.silu(jnp.einsum("bqd,edf->bqef", x, gate)) * jnp.einsum("bqd,edf->bqef", x, up)
    share = (jax.nn.one_hot(chosen, NUM_EXPERTS) * weights[..., None]).sum(axis=-2)
    return jnp.einsum("bqef,efd,bqe->bqd", hidden, down, share)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("shape", [(3, 11), (2, 1)])
def test_equals_the_dense_definition(shape, renormalize):
    experts = Experts(NUM_EXPERTS, 2, INNER, renormalize)
    arguments = (*tokens(*shape), *weights_of_experts())
    actual, wanted = (jax.jit(form, static_argnums=5)(*arguments, experts) for form in (routed, dense))
    np.testing.assert_allclose(actual, wanted, atol=1e-5)


def test_gradients_equal_those_of_the_dense_definition():
    experts = Experts(NUM_EXPERTS, 2, INNER, True)
    arguments = (*tokens(3, 11), *weights_of_experts())
    actual, wanted = (
        jax.jit(jax.grad(lambda *xs, form=form: jnp.sin(form(*xs, experts)).sum(), range(5)))(*arguments)
        for form in (routed, dense)
    )
    assert all(float(jnp.abs(part).max()) > 0.1 for part in actual)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), actual, wanted)


def test_updates_equal_whole_matrices_in_value_and_gradient():
    experts = Experts(NUM_EXPERTS, 2, INNER, True)
    x, scores = tokens(3, 11)
    kernels = weights_of_experts()
    keys = jax.random.split(jax.random.key(4), 6)
    updates = [
        (
            jax.random.normal(a_key, (NUM_EXPERTS, size, 3)),
            0.1 * jax.random.normal(b_key, (NUM_EXPERTS, 3, made)),
        )
        for a_key, b_key, (_, size, made) in zip(keys[:3], keys[3:], [k.shape for k in kernels], strict=True)
    ]

    def apart(updates):
        adapted = [AdaptedKernels(kernel, *pair) for kernel, pair in zip(kernels, updates, strict=True)]
        return jnp.sin(routed(x, scores, *adapted, experts)).sum()

    def whole(updates):
        changed = [kernel + a @ b for kernel, (a, b) in zip(kernels, updates, strict=True)]
        return jnp.sin(dense(x, scores, *changed, experts)).sum()

    (actual, found), (wanted, gradient) = (
        jax.jit(jax.value_and_grad(form))(updates) for form in (apart, whole)
    )
    np.testing.assert_allclose(actual, wanted, rtol=1e-5)
    assert all(float(jnp.abs(part).max()) > 0.1 for part in jax.tree.leaves(gradient))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), found, gradient)


def test_route_golden():
    # softmax(log p) = p: experts 2 and 0 are the best of the first token; equal ones go by their number.
    scores = jnp.log(jnp.array([[[0.3, 0.1, 0.6], [0.25, 0.25, 0.5]]]))
    for renormalize, wanted in ((False, [0.6, 0.3, 0.5, 0.25]), (True, [2 / 3, 1 / 3, 2 / 3, 1 / 3])):
        weights, chosen = route(scores, Experts(3, 2, 4, renormalize))
        np.testing.assert_allclose(weights.ravel(), wanted, atol=1e-6)
        assert chosen.tolist() == [[[2, 0], [2, 0]]]


def test_a_token_depends_on_no_other():
    """No expert has a capacity: not even if all others crowd into its experts, or are not finite."""
    experts = Experts(NUM_EXPERTS, 2, INNER, False)
    x, scores = tokens(2, 40)
    run = jax.jit(lambda x, scores: routed(x, scores, *weights_of_experts(), experts))
    wanted = run(x, scores)[0, :3]
    crowded = scores.at[0, 3:].set(scores[0, :1]).at[1].set(scores[0, :1])
    for others in (7.0, jnp.nan):
        spoiled = jnp.full_like(x, others).at[0, :3].set(x[0, :3])
        np.testing.assert_allclose(run(spoiled, crowded)[0, :3], wanted, atol=1e-5)
    np.testing.assert_allclose(run(x[:1, :3], scores[:1, :3])[0], wanted, atol=1e-5)


def test_runs_repeat_bit_for_bit_and_follow_the_order_of_the_rows():
    experts = Experts(NUM_EXPERTS, 3, INNER, True)
    x, scores = tokens(8, 5)
    run = jax.jit(lambda x, scores: routed(x, scores, *weights_of_experts(), experts))
    out = run(x, scores)
    np.testing.assert_array_equal(run(x, scores), out)
    order = jnp.array([3, 1, 7, 0, 2, 6, 5, 4])
    np.testing.assert_allclose(run(x[order], scores[order]), out[order], atol=1e-6)


def test_the_module_keeps_float32_parameters_and_computes_in_its_dtype():
    config = CausalLM.from_config(CASES["qwen3_moe"]).config
    experts = config.layers[0].experts
    module = ExpertsMlp(config, experts, jnp.bfloat16)
    x = jax.random.normal(jax.random.key(0), (2, 3, config.width), jnp.bfloat16)
    variables = jax.jit(module.init)(jax.random.key(1), x)
    shapes = {path: leaf.shape for path, leaf in flatten_dict(variables["params"], sep="/").items()}
    assert shapes == {"router/kernel": (32, 6), "gate": (6, 32, 24), "up": (6, 32, 24), "down": (6, 24, 32)}
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype("float32")}
    exact = ExpertsMlp(config, experts, jnp.float32)
    low, high = (jax.jit(part.apply)(variables, x) for part in (module, exact))
    assert (low.dtype, high.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(low.astype(jnp.float32), high, atol=0.02 * float(jnp.abs(high).max()))


def test_low_precision_routes_in_float32():
    """Two experts whose scores differ by less than bfloat16 can tell: the better one is found all the same."""
    config, experts = CausalLM.from_config(CASES["mixtral"]).config, Experts(3, 1, 8, True)
    router = jnp.ones((config.width, 3)).at[:, 2].set(1.001)
    wide, narrow = jnp.ones((3, config.width, 8)), jnp.zeros((3, 8, config.width)).at[2].set(1.0)
    params = {"router": {"kernel": router}, "gate": wide, "up": wide, "down": narrow}
    x = jnp.ones((1, 1, config.width), jnp.bfloat16)
    out = jax.jit(ExpertsMlp(config, experts, jnp.bfloat16).apply)({"params": params}, x)
    assert (out > 0).all()


def test_the_cost_of_a_layer_does_not_grow_with_the_experts():
    """256 tokens that visit 2 experts each: three products of 512 rows, however many experts there are."""
    width, inner = 64, 128
    products = 3 * 2 * 512 * width * inner

    def layer(count):
        gate, down = jnp.zeros((count, width, inner)), jnp.zeros((count, inner, width))
        weights, chosen = jnp.zeros((1, 256, 2)), jnp.zeros((1, 256, 2), jnp.int32)
        mix = partial(mix_experts, glu=plain_glu(jax.nn.relu))
        return cost(mix, jnp.zeros((1, 256, width)), weights, chosen, gate, gate, down)

    costs = {count: layer(count) for count in (8, 16, 32)}
    # What is outside the loops is multiplied by their trips too: hence not 2.1, as for one product.
    assert all(products <= found < 3 * products for found in costs.values()), costs
    assert costs[16] < 1.2 * costs[8] and costs[32] < 1.2 * costs[16], costs


@pytest.mark.parametrize("case", CASES)
def test_the_table_fills_every_parameter_once(case):
    """An expert's tensor fills its slice of a parameter; everything else fills a whole one."""
    model = CausalLM.from_config(CASES[case])
    shapes = flatten_dict(jax.eval_shape(model.init, jax.random.key(0)), sep="/")
    filled = [(path, entry.index) for entry in model.entries() for path in entry.paths]
    stacked = {
        path: shape.shape[0] for path, shape in shapes.items() if path.split("/")[-2:-1] == ["experts"]
    }
    wanted = [(path, index) for path in shapes for index in range(stacked.get(path, 0)) or [None]]
    assert sorted(filled, key=str) == sorted(wanted, key=str)


def test_which_layers_have_experts():
    layers = CausalLM.from_config(CASES["qwen3_moe-some-layers"]).config.layers
    assert [layer.experts is not None for layer in layers] == [False, True, False, False]
    layers = CausalLM.from_config(Qwen3MoeConfig(**QWEN | dict(num_experts=0))).config.layers
    assert [layer.experts for layer in layers] == [None, None]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MixtralConfig(**MIXTRAL, router_jitter_noise=0.1), "`router_jitter_noise` must be 0, got 0.1"),
        (
            MixtralConfig(**MIXTRAL | dict(num_experts_per_tok=6)),
            "between 1 and the number of experts, 5; got 6",
        ),
        (
            Qwen3MoeConfig(**QWEN | dict(num_experts_per_tok=0)),
            "between 1 and the number of experts, 6; got 0",
        ),
    ],
)
def test_unsupported_options_are_named(config, message):
    with pytest.raises(ValueError, match=message):
        CausalLM.from_config(config)


class TestGroups:
    """DeepSeek-V3's router: sigmoids, groups, and a bias for the choice alone."""

    EXPERTS = Experts(6, 2, 4, True, scoring="sigmoid", groups=3, groups_per_token=2, scale=1.5)
    SCORES = np.array([[[2.0, -1.0, 0.5, 0.6, 1.9, -3.0]]], np.float32)

    def test_route_golden(self):
        sigmoids = 1 / (1 + np.exp(-self.SCORES[0, 0]))
        # Sums of pairs: 1.15, 1.27, 0.92. The last group is out, though its first expert is the second best of all.
        weights, chosen = route(jnp.asarray(self.SCORES), self.EXPERTS, jnp.zeros(6))
        assert chosen.tolist() == [[[0, 3]]]
        wanted = 1.5 * sigmoids[[0, 3]] / sigmoids[[0, 3]].sum()
        np.testing.assert_allclose(weights[0, 0], wanted, rtol=1e-6)

    def test_the_bias_moves_the_choice_and_no_weight(self):
        bias = jnp.array([-9.0, -9.0, 0.0, 0.0, 0.0, 0.0])
        weights, chosen = route(jnp.asarray(self.SCORES), self.EXPERTS, bias)
        assert chosen.tolist() == [[[4, 3]]]
        sigmoids = 1 / (1 + np.exp(-self.SCORES[0, 0, [4, 3]]))
        np.testing.assert_allclose(weights[0, 0], 1.5 * sigmoids / sigmoids.sum(), rtol=1e-6)
        gradient = jax.grad(lambda bias: route(jnp.asarray(self.SCORES), self.EXPERTS, bias)[0][0, 0, 0])(
            bias
        )
        assert not gradient.any()
