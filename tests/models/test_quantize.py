# SPDX-License-Identifier: Apache-2.0
"""Rounded frozen weights: how far they are off, how many bytes they take, and that nothing of them trains."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from transformers import MixtralConfig

from jrl.mesh import abstract_mesh, path_name, tree_shardings
from jrl.models import quantize
from jrl.models.adapters import LoraConfig
from jrl.models.entries_io import parameter_targets
from jrl.models.model import make_model
from jrl.models.quantize import QuantizedKernel, num_weights, quantize_frozen, quantize_kernel
from jrl.trainers.checkpoints.checkpointer import tree_sha256
from tests.jaxprs import equations
from tests.models.family_cases import CASES
from tests.models.family_cases_moe import MIXTRAL
from tests.models.test_policy import scorer
from tests.tiny import VOCAB_SIZE, tiny_lm, tiny_prompts

# NormalFloat's widest gap between neighbours is 1 − 0.6962 on the negative side: half of it, times the largest weight.
NF4_HALF_GAP = (1.0 - 0.6961928) / 2


def kernel(shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def adapted(name, kind):
    """(parameters → hidden states, trainable, frozen) of a rounded model with an adapter on all its kernels."""
    lm, whole = model(name)
    config = LoraConfig(r=2, target_modules="all-linear")
    params, frozen = lm.split_params(quantize_frozen(whole, kind), adapter=config, key=jax.random.key(0))
    # Rows of a number that no kernel has.
    policy, prompts = lm.policy(adapter=config), tiny_prompts(3, 5)

    def hidden(params, frozen):
        return policy.branch(params, frozen, policy.trunk(frozen, prompts), prompts, None).policy

    return hidden, params, frozen


def rounded_leaves(tree):
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, QuantizedKernel))
    return [leaf for leaf in leaves if isinstance(leaf, QuantizedKernel)]


@functools.cache
def model(name):
    """(model, whole parameters), of one layer."""
    if name == "llama":
        return tiny_lm("llama", num_layers=1)
    lm = make_model(MixtralConfig(**MIXTRAL | {"num_hidden_layers": 1}))
    return lm, lm.init(jax.random.key(0))


@pytest.mark.parametrize(("shape", "input_axes"), [((128, 6), 1), ((128, 3, 4), 1), ((4, 32, 10), 2)])
@pytest.mark.slow
def test_rounding_stays_within_half_a_step(shape, input_axes):
    w = kernel(shape)
    matrix = np.asarray(w).reshape(128, -1)
    rounded = {kind: quantize_kernel(w, kind, input_axes=input_axes) for kind in ("int8", "nf4")}
    off = {
        kind: np.abs(np.asarray(q.astype(jnp.float32)).reshape(128, -1) - matrix)
        for kind, q in rounded.items()
    }
    assert rounded["int8"].astype(jnp.float32).shape == shape
    largest = np.abs(matrix).max(axis=0)
    assert (off["int8"] <= largest / 127.5 / 2 + 1e-6).all()
    in_block = np.abs(matrix).reshape(2, 64, -1).max(axis=1, keepdims=True)
    assert (off["nf4"].reshape(2, 64, -1) <= NF4_HALF_GAP * in_block + 1e-6).all()
    # Four bits are worse than eight, and both are worse than none.
    assert 0 < off["int8"].mean() < 0.2 * off["nf4"].mean()


def test_known_numbers():
    # One output, two inputs: the largest is 1, its block's scale; 0.44070983 is one of the sixteen numbers.
    rounded = quantize_kernel(jnp.asarray([[2.0], [0.88141966]]), "nf4")
    np.testing.assert_array_equal(rounded.values, [[15 | 12 << 4]])
    np.testing.assert_allclose(rounded.astype(jnp.float32), [[2.0], [0.88141966]], rtol=1e-6)
    rounded = quantize_kernel(jnp.asarray([[-127.5], [3.4]]), "int8")
    np.testing.assert_array_equal(rounded.values, [[-128], [3]])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((128, 6), {}),
        ((96, 2, 3), {}),  # blocks of 32
        ((4, 16, 5), {"input_axes": 2}),
        ((3, 64, 4), {"stacked": True}),
    ],
)
def test_four_bits_stand_for_the_numbers_of_qwix(shape, options, dtype, monkeypatch):
    """Looked up, and on a TPU chosen without a lookup."""
    rounded = quantize_kernel(kernel(shape), "nf4", **options)
    start = int(rounded.stacked)
    pairs = jnp.stack([rounded.values & 15, rounded.values >> 4], axis=start + 1)
    values = pairs.reshape(*shape[:start], -1, *rounded.values.shape[start + 1 :])
    dequantized = (
        qwix.dequantize(qwix.QArray(values, rounded.scales, qtype="nf4")).reshape(shape).astype(dtype)
    )
    for name, looks_up in (("cpu", True), ("tpu", False)):
        monkeypatch.setattr(quantize, "platform", lambda name=name: name)
        program = jax.make_jaxpr(lambda stored: stored.astype(dtype))(rounded)
        assert ("gather" in str(program)) is looks_up
        found = rounded.astype(dtype)
        assert found.dtype == dtype
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(dequantized, np.float32))
    assert len(np.unique(rounded.values)) > 16  # many pairs of the sixteen levels


def test_bytes():
    w = kernel((256, 4, 32))
    sizes = {
        kind: sum(leaf.nbytes for leaf in jax.tree.leaves(quantize_kernel(w, kind)))
        for kind in ("int8", "nf4")
    }
    # A byte a weight and four an output; half a byte a weight and four a block of 64.
    assert sizes == {"int8": w.size + 4 * 128, "nf4": w.size // 2 + 4 * w.size // 64}
    arguments = (
        jax.jit(lambda q: q.astype(jnp.float32)).lower(quantize_kernel(w, "nf4")).compile().memory_analysis()
    )
    assert arguments.argument_size_in_bytes == sizes["nf4"]


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.slow
def test_every_expert_is_rounded_as_if_it_were_alone(kind):
    w = kernel((3, 128, 6)) * jnp.asarray([1.0, 10.0, 0.1]).reshape(3, 1, 1)
    together = quantize_kernel(w, kind, stacked=True)
    assert together.shape == w.shape
    assert num_weights({"experts": together}) == w.size
    expanded = together.astype(jnp.float32)
    for index in range(3):
        alone = quantize_kernel(w[index], kind).astype(jnp.float32)
        np.testing.assert_array_equal(expanded[index], alone)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param("llama", "bfloat16", marks=pytest.mark.slow),
        pytest.param("llama", "int8", marks=pytest.mark.slow),
        ("llama", "nf4"),
        pytest.param("mixtral", "int8", marks=pytest.mark.slow),
        pytest.param("mixtral", "nf4", marks=pytest.mark.slow),
    ],
)
def test_a_rounded_base_is_near_the_model_and_only_adapters_train(name, kind):
    lm, whole = model(name)
    targets = ("q_proj", "down_proj") if name == "llama" else ("q_proj", "o_proj")
    config = LoraConfig(r=2, target_modules=targets, use_dora=True)
    params, frozen = lm.split_params(quantize_frozen(whole, kind), adapter=config, key=jax.random.key(0))
    # Four of attention and three of the MLP, or three stacks of experts.
    assert len(rounded_leaves(frozen)) == (0 if kind == "bfloat16" else 7)
    assert num_weights(frozen) == num_weights(whole)
    assert {leaf.dtype for leaf in jax.tree.leaves(frozen["embed"])} == {jnp.dtype(jnp.bfloat16)}
    policy, prompts = lm.policy(adapter=config), tiny_prompts()
    real = prompts.attention_mask
    score = scorer(policy)
    exact = jax.jit(lm.logits)(whole, *prompts[:2])[real]
    got = score(params, frozen, prompts)[0][real]
    # The adapter starts at nothing, whatever the base is kept in: DoRA's norms are those of the rounded weights.
    np.testing.assert_allclose(got, score({}, frozen, prompts)[0][real], atol=1e-5)
    bound = {"bfloat16": 0.02, "int8": 0.03, "nf4": 0.4}[kind]
    gap = float(jnp.abs(got - exact).max() / jnp.abs(exact).max())
    assert bound / 50 < gap < bound

    def loss(params):
        hidden = policy.branch(params, frozen, policy.trunk(frozen, prompts), prompts, None).policy
        return jnp.square(policy.logits(params, frozen, hidden)[..., :VOCAB_SIZE]).sum()

    moved = jax.tree.map(lambda x: x + 0.1, params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss))(moved)):
        assert leaf.dtype == jnp.float32 and float(jnp.abs(leaf).max()) > 0, jax.tree_util.keystr(path)


def test_fingerprint_tells_rounded_trees_apart():
    _, whole = tiny_lm("gpt2")
    prints = {
        kind: tree_sha256(quantize_frozen(whole, kind)) for kind in ("float32", "bfloat16", "int8", "nf4")
    }
    assert len(set(prints.values())) == 4
    assert prints["nf4"] == tree_sha256(quantize_frozen(whole, "nf4"))


@pytest.mark.slow
def test_a_value_branch_of_rounded_layers_is_float32():
    lm, whole = tiny_lm("llama")
    split = {"adapter": LoraConfig(), "num_value_layers_unfrozen": 1}
    params, _ = lm.split_params(quantize_frozen(whole, "nf4"), key=jax.random.key(0), **split)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}
    shapes = jax.tree.map(jnp.shape, params["value_branch"]["layers_1"])
    assert shapes == jax.tree.map(jnp.shape, whole["layers_1"])


EXACT = {
    "deepseek_v3": {"layers_1/experts/choice_bias", "layers_1/experts/router/kernel"}
    | {"layers_2/experts/choice_bias", "layers_2/experts/router/kernel"},
    "glm4_moe": {"layers_1/experts/choice_bias", "layers_1/experts/router/kernel"}
    | {"layers_2/experts/choice_bias", "layers_2/experts/router/kernel"},
    "gpt_oss": {"layers_0/attn/sinks", "layers_1/attn/sinks"},
    "qwen3_5_text": {f"layers_{i}/attn/{name}" for i in (0, 2) for name in ("log_rates", "decay_bias")},
    "kimi_linear": {f"layers_{i}/attn/{name}" for i in (0, 2) for name in ("log_rates", "decay_bias")}
    | {f"layers_{i}/experts/{name}" for i in (1, 2) for name in ("choice_bias", "router/kernel")},
    "falcon_h1": {f"layers_{i}/attn/mamba/{n}" for i in (0, 1) for n in ("log_rates", "step_bias", "skip")},
    "nemotron_h": {f"layers_{i}/attn/{n}" for i in (0, 2) for n in ("log_rates", "step_bias", "skip")}
    | {"layers_1/experts/choice_bias", "layers_1/experts/router/kernel"},
    "jamba": {f"layers_{i}/attn/{n}" for i in (0, 2) for n in ("log_rates", "step_bias", "skip")},
    "mixtral": set(),
    "qwen3_moe": set(),
    "llama": set(),
}
"""Leaves that stay float32, of families that have some, and of old ones that have none."""


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", EXACT)
def test_what_chooses_experts_and_steers_a_recurrence_stays_float32(name, kind):
    shapes = jax.eval_shape(make_model(CASES[name]).init, jax.random.key(0))
    dtypes = {
        "rounded": jax.eval_shape(functools.partial(quantize_frozen, kind=kind), shapes),
        "read": parameter_targets(shapes, dtype=jnp.bfloat16)[0],
    }
    for where, tree in dtypes.items():
        whole = {
            path_name(path)
            for path, leaf in jax.tree_util.tree_leaves_with_path(
                tree, is_leaf=lambda leaf: isinstance(leaf, QuantizedKernel)
            )
            if not isinstance(leaf, QuantizedKernel) and leaf.dtype == jnp.float32
        }
        assert whole == EXACT[name], where


def test_an_odd_number_of_inputs_is_refused():
    with pytest.raises(
        ValueError, match="nf4 packs pairs of inputs: a kernel must have an even number, got 7"
    ):
        quantize_kernel(kernel((7, 2)), "nf4")


def test_rounded_kernels_are_split_as_the_kernels_they_stand_for():
    mesh = jax.sharding.AbstractMesh((1, 2, 2), ("data", "fsdp", "tensor"))
    _, whole = tiny_lm("llama")
    frozen = jax.eval_shape(lambda: quantize_frozen(whole, "nf4"))
    shardings, report = tree_shardings(mesh, frozen)
    attn, mlp = shardings["layers_0"]["attn"], shardings["layers_0"]["mlp"]
    assert tuple(attn["q"]["kernel"].values.spec) == ("fsdp", "tensor", None)
    assert tuple(attn["o"]["kernel"].values.spec) == ("tensor", "fsdp")
    assert tuple(mlp["down"]["kernel"].values.spec) == ("tensor", "fsdp")
    # One block of inputs is not split.
    assert tuple(mlp["up"]["kernel"].scales.spec) == (None, "tensor")
    assert report == []


def test_rounded_experts_are_split_as_those_they_stand_for():
    mesh = jax.sharding.AbstractMesh((1, 2, 2), ("data", "fsdp", "tensor"))
    _, whole = model("mixtral")
    frozen = jax.eval_shape(lambda: quantize_frozen(whole, "nf4"))
    shardings, report = tree_shardings(mesh, frozen)
    experts = shardings["layers_0"]["experts"]
    assert tuple(experts["up"].values.spec) == (None, "fsdp", "tensor")
    assert tuple(experts["up"].scales.spec) == (None, None, "tensor")
    assert tuple(experts["down"].values.spec) == (None, "tensor", "fsdp")
    assert report == []


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_the_backward_pass_keeps_rounded_kernels_and_no_expanded_ones(name, kind):
    (_, whole), (hidden, params, frozen) = model(name), adapted(name, kind)
    router = (32, 5)
    kernels = {
        leaf.shape for leaf in jax.tree.leaves(whole["layers_0"]) if leaf.ndim > 1 and leaf.shape != router
    }
    backward = jax.eval_shape(lambda p, f: jax.vjp(lambda q: hidden(q, f), p)[1], params, frozen)
    kept = {leaf.shape for leaf in jax.tree.leaves(backward) if jnp.issubdtype(leaf.dtype, jnp.floating)}
    assert not kept & kernels
    assert any(leaf.dtype in (jnp.int8, jnp.uint8) for leaf in jax.tree.leaves(backward))


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_no_zeros_are_made_in_place_of_gradients_of_rounded_kernels(name, kind):
    hidden, params, frozen = adapted(name, kind)
    rounded = {leaf.shape for leaf in jax.tree.leaves(frozen) if leaf.dtype in (jnp.int8, jnp.uint8)}
    program = jax.make_jaxpr(jax.grad(lambda *given: hidden(*given).sum()))(params, frozen).jaxpr
    barriers = [eqn for eqn in equations(program) if eqn.primitive.name == "optimization_barrier"]
    tied = Counter(one.aval.dtype for eqn in barriers for one in eqn.invars if one.aval.shape in rounded)
    assert len(tied) == 1 and tied[jnp.dtype(jnp.int8 if kind == "int8" else jnp.uint8)] > len(rounded)


@pytest.mark.parametrize("family", ["gpt2", "jamba", "kimi_linear", "mixtral", "nemotron_h"])
def test_a_rounded_kernel_is_split_as_the_kernel_is(family):
    """A single axis stands for its inputs, split as the first of them."""
    lm = make_model(CASES[family])
    shapes = jax.eval_shape(lm.init, jax.random.key(0))
    mesh = abstract_mesh(fsdp=2, tensor=2, num_devices=4)
    rounded = jax.eval_shape(lambda tree: quantize_frozen(tree, "int8"), shapes)
    places = {path_name(path): place for path, place in leaves_of(tree_shardings(mesh, shapes)[0])}
    found = {path_name(path): place for path, place in leaves_of(tree_shardings(mesh, rounded)[0])}
    kernels = {
        path_name(path): leaf for path, leaf in leaves_of(shapes) if f"{path_name(path)}/values" in found
    }
    assert len(kernels) > 3
    for name, leaf in kernels.items():
        start, inputs = int(not name.endswith("/kernel")), 1 + name.endswith("/o/kernel")
        axes = (*places[name].spec, *[None] * leaf.ndim)[: leaf.ndim]
        wanted = (*axes[: start + 1], *axes[start + inputs :])
        got = found[f"{name}/values"].spec
        assert (*got, *[None] * len(wanted))[: len(wanted)] == wanted, name


def leaves_of(tree):
    return jax.tree_util.tree_leaves_with_path(tree)
