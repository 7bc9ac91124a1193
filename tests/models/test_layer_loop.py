# SPDX-License-Identifier: Apache-2.0
"""Equal layers that share a body compute what layers one by one compute, and the program stops growing with them."""

from __future__ import annotations

import functools
import re
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import BertConfig, Gemma4TextConfig

from jrl.models import layer_loop, score_blocks
from jrl.models import products as products_module
from jrl.models.adapters.config import LoraConfig
from jrl.models.classifier import Classifier
from jrl.models.encoder import Encoder
from jrl.models.layer_loop import DEAR, Run, find_runs
from jrl.models.model import make_model
from jrl.models.noise import EmbeddingNoise
from jrl.models.products import CPU, GPU, PLAIN, products
from jrl.models.quantize import quantize_frozen
from jrl.ops.logprobs import logprobs_from_logits
from tests.jaxprs import equations, read_loop
from tests.models.classifier_cases import BERT, labelled
from tests.models.family_cases import CASES
from tests.models.family_cases_gemma4 import GEMMA4
from tests.tiny import tiny_contexts, tiny_hf_config, tiny_prompts

# Of five layers two, side by side, have no adapter on their MLP.
ADAPTER = LoraConfig(r=2, target_modules=r"model\.layers\.(\d\.self_attn\.q_proj|[034]\.mlp\.up_proj)")
DROPPING = dict(embd_pdrop=0.1, attn_pdrop=0.2, resid_pdrop=0.3)


class Case(NamedTuple):
    """A model, and how it trains.

    Attributes:
      hf_config: The model.
      split: Arguments that `split_params` and the policy share.
      policy: Arguments of the policy alone.
      frozen_dtype: Of what does not train.
    """

    hf_config: Any
    split: dict[str, Any]
    policy: dict[str, Any]
    frozen_dtype: str = "float32"


def deep(name: str, num_layers: int) -> Any:
    """The tiny config of a family with so many layers."""
    fields = CASES[name].to_dict() | {"num_hidden_layers": num_layers}
    if name == "gemma2":
        fields["layer_types"] = (["sliding_attention", "full_attention"] * num_layers)[:num_layers]
    return type(CASES[name]).from_dict(fields)


GEMMA4_DEEP = Gemma4TextConfig(
    **GEMMA4
    | dict(num_hidden_layers=10, layer_types=["sliding_attention", "full_attention"] * 5)
    | dict(num_kv_shared_layers=6)
)
GEMMA4_SHALLOW = Gemma4TextConfig(
    **GEMMA4
    | dict(num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2)
    | dict(num_kv_shared_layers=2)
)
MODELS: dict[str, Case] = {
    "gpt2": Case(tiny_hf_config("gpt2", 3), {}, {}),
    "llama": Case(tiny_hf_config("llama", 3), {}, {}),
    "gemma2": Case(deep("gemma2", 5), {}, {}),
    "mixtral": Case(deep("mixtral", 3), {}, {}),
    "t5": Case(tiny_hf_config("t5", 3), {}, {}),
    "lora": Case(tiny_hf_config("llama", 5), {"adapter": ADAPTER}, {}),
    "dora": Case(tiny_hf_config("llama", 3), {"adapter": LoraConfig(r=2, use_dora=True)}, {}),
    "hydra": Case(tiny_hf_config("gpt2", 5), {"num_layers_unfrozen": 2}, {}),
    "value_branch": Case(
        tiny_hf_config("llama", 5), {"num_layers_unfrozen": 2, "num_value_layers_unfrozen": 3}, {}
    ),
    # Of ten layers the last six read the keys of the third and fourth. Above the cut lie four, twice for the value.
    "gemma4": Case(GEMMA4_DEEP, {"num_layers_unfrozen": 4, "num_value_layers_unfrozen": 4}, {}),
    "gemma4_lenders": Case(GEMMA4_SHALLOW, {}, {}),
    "remat": Case(tiny_hf_config("gpt2", 3), {}, {"remat": True}),
    "t5_remat": Case(tiny_hf_config("t5", 3), {}, {"remat": True}),
    "int8": Case(tiny_hf_config("llama", 3), {"adapter": ADAPTER}, {}, "int8"),
    "nf4_remat": Case(tiny_hf_config("llama", 3), {"adapter": ADAPTER}, {"remat": True}, "nf4"),
}


@functools.cache
def parts(name: str) -> tuple[Any, Any, Any, Any]:
    """(model, trainable, frozen, inputs) of a case."""
    case = MODELS[name]
    lm = make_model(case.hf_config)
    whole = quantize_frozen(lm.init(jax.random.key(0)), case.frozen_dtype if case.split else "float32")
    params, frozen = lm.split_params(whole, key=jax.random.key(1), **case.split)
    if "lora" in params:
        rng = np.random.default_rng(0)  # a fresh adapter does nothing
        moved = jax.tree.map(lambda x: x + np.float32(0.1 * rng.normal(size=x.shape)), params["lora"])
        params = params | {"lora": moved}
    return lm, params, frozen, tiny_contexts(4, 7, 9) if name.startswith("t5") else tiny_prompts(4, 11)


def objective(name: str, share: bool, **options: Any) -> Any:
    """(params, frozen, key) -> a number that depends on all that a policy says of its rows, and their log-probs."""
    lm, _, _, inputs = parts(name)
    policy = lm.policy(share_layers=share, **MODELS[name].split | MODELS[name].policy | options)

    def run(params: Any, frozen: Any, key: Any) -> Any:
        features = policy.branch(params, frozen, policy.trunk(frozen, inputs), inputs, key)
        logits = policy.logits(params, frozen, features.policy)[:, :-1]
        logprobs = logprobs_from_logits(logits, inputs.tokens[:, 1:]) * inputs.attention_mask[:, 1:]
        return logprobs.sum() + jnp.sin(features.value).sum(), logprobs

    return run


def graded(name: str, share: bool, key: Any = None) -> Any:
    _, params, frozen, _ = parts(name)
    return jax.jit(jax.value_and_grad(objective(name, share), has_aux=True))(params, frozen, key)


def assert_close(actual: Any, expected: Any) -> None:
    """Equal to float32 rounding, leaf by leaf."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    pairs = zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True)
    for (path, one), two in pairs:
        # What is truly zero, as the gradient of a key's bias, is noise.
        error, scale = np.linalg.norm(one - two), max(np.linalg.norm(two), 0.1)
        assert error <= 1e-5 * scale, (jax.tree_util.keystr(path), error / scale)


@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_are_those_of_layers_one_by_one(name: str) -> None:
    shared, alone = (graded(name, share) for share in (True, False))
    assert_close(shared, alone)
    trained = [tree for layer, tree in alone[1].items() if layer.startswith(("layers_", "lora"))]
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(trained)}
    # All but biases of keys, which change nothing, and scales of the stream, which never train.
    moves = {name: np.abs(leaf).max() > 1e-4 for name, leaf in leaves.items() if "bias" not in name}
    assert all(moved != ("stream_scale" in name) for name, moved in moves.items())


def test_an_encoder_computes_the_same() -> None:
    model = Classifier.from_config(labelled(BertConfig(**BERT | {"num_hidden_layers": 3})))
    params, prompts = model.init(jax.random.key(0)), tiny_prompts(3, 11)

    def graded(share: bool, remat: bool) -> Any:
        encoder = Encoder(model.config, remat=remat, share_layers=share)

        def run(params: Any) -> Any:
            scores: Any = encoder.apply({"params": params}, *prompts[:2])
            return jnp.sin(scores).sum()

        return jax.jit(jax.value_and_grad(run))(params)

    wanted = graded(False, False)
    assert_close(graded(True, False), wanted)
    assert_close(graded(True, True), wanted)


def loops(name: str, key: Any = None, **options: Any) -> list[int]:
    """Rounds of every loop over layers in a gradient, forwards and backwards."""
    _, params, frozen, _ = parts(name)
    run = objective(name, True, **options)
    jaxpr = jax.make_jaxpr(jax.grad(lambda *given: run(*given)[0]))(params, frozen, key)
    return [eqn.params["length"] for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]


@pytest.mark.parametrize(
    ("name", "forwards", "backwards"),
    [
        ("gpt2", [3], [3]),
        ("gemma2", [2], [2]),  # two layers a round, and the fifth alone
        ("t5", [3, 3], [3, 3]),
        ("lora", [2, 2], [2, 2]),  # the first alone: the next two lack an adapter that it has
        ("hydra", [3, 2], [2]),
        # Of the last three the policy has one frozen, and the value function trains its own.
        ("value_branch", [2, 2, 3], [3, 2]),
        ("gemma4", [2, 2], [2, 2]),  # two layers a round; those that lend keys stand alone
    ],
)
def test_which_layers_share_a_body(name: str, forwards: list[int], backwards: list[int]) -> None:
    assert loops(name) == forwards + backwards


def test_frozen_layers_share_no_body_with_trained_ones() -> None:
    """Their gradients would be computed and thrown away. Noise on the embeddings leaves no trunk to run before."""
    assert loops("hydra", jax.random.key(0), noise=EmbeddingNoise(5.0)) == [3, 2, 2]


def kept(remat: bool) -> list[tuple[int, ...]]:
    """Shapes of what the loop over layers leaves for the backward pass; those of parameters are given to both."""
    _, params, frozen, _ = parts("gpt2")
    run = objective("gpt2", True, remat=remat)
    jaxpr = jax.make_jaxpr(jax.grad(lambda *given: run(*given)[0]))(params, frozen, None)
    forwards = next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    return [aval.shape[1:] for aval in read_loop(forwards).left]


def test_the_backward_pass_is_left_products_with_weights_and_what_attention_mixed() -> None:
    stream, mixed = (4, 11, 32), (4, 4, 11, 8)
    # The stream, queries, keys, values, attention's output and what the MLP's activation reads. No kernel, no score.
    narrow, wide = [(44, 32)] * 4, [(44, 64)]
    assert sorted(kept(remat=False)) == sorted([stream, mixed, *narrow, *wide])
    assert kept(remat=True) == [stream]


class TestFrozenLayersOnATpu:
    """They are picked where they lie, and not stacked."""

    @pytest.fixture(autouse=True)
    def on_tpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(layer_loop, "platform", lambda: "tpu")

    @pytest.mark.parametrize("name", ["hydra", "lora", "dora", "value_branch", "int8", "nf4_remat"])
    def test_values_and_gradients_are_those_of_layers_one_by_one(self, name: str) -> None:
        assert_close(graded(name, True), graded(name, False))

    @pytest.mark.parametrize(("name", "stacks_kernels"), [("lora", False), ("hydra", True), ("llama", True)])
    def test_what_is_frozen_is_given_to_loops_as_it_lies(self, name: str, stacks_kernels: bool) -> None:
        """Of the hydra the trunk is frozen, and the branch trains."""
        lm, params, frozen, _ = parts(name)
        run = objective(name, True)
        jaxpr = jax.make_jaxpr(jax.grad(lambda *given: run(*given)[0]))(params, frozen, None)
        kernel = {lm.config.width, lm.config.mlp_width}
        loops = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
        stacked, picks = [], []
        for loop in loops:
            stacked.append(any(set(one.shape[1:]) == kernel for one in read_loop(loop).stacked))
            picks.append(any(eqn.primitive.name == "cond" for eqn in equations(loop.params["jaxpr"].jaxpr)))
        assert any(stacked) == stacks_kernels
        assert any(picks) == (name != "llama") and not any(map(all, zip(stacked, picks, strict=True)))


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "t5", "lora", "dora"])
def test_bfloat16_stacks_kernels_as_products_read_them(name: str) -> None:
    """Half the bytes. DoRA alone reads kernels otherwise, in norms."""
    _, params, frozen, _ = parts(name)
    run = objective(name, True, compute_dtype=jnp.bfloat16)
    jaxpr = jax.make_jaxpr(lambda *given: run(*given)[0])(params, frozen, None)
    for loop in (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"):
        stacked = read_loop(loop).stacked
        rounded = sum(one.size for one in stacked if one.dtype == jnp.bfloat16)
        others = sum(one.size for one in stacked) - rounded
        assert rounded == 0 if name == "dora" else rounded > 5 * others


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_bfloat16_computes_what_layers_one_by_one_compute(name: str) -> None:
    _, params, frozen, _ = parts(name)
    shared, alone = (
        jax.jit(objective(name, share, compute_dtype=jnp.bfloat16))(params, frozen, None)[1]
        for share in (True, False)
    )
    np.testing.assert_allclose(shared, alone, atol=0.1)


def test_blocks_of_scores_leave_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention makes the scores of a block anew; a loop over layers that kept them would hold those of all blocks."""
    whole, rows, scores = kept(remat=False), 4, 4 * 11 * 11
    monkeypatch.setattr(score_blocks, "SCORES_BYTES", 4 * scores)
    blocks = sorted(map(np.prod, kept(remat=False)))
    assert blocks == sorted(map(np.prod, whole)) and rows * scores not in blocks


def test_what_is_dear_has_these_names() -> None:
    def dear(x: Any) -> Any:
        x = jax.lax.ragged_dot(x @ x, x[None], jnp.array([8]))
        return jnp.sort(jax.lax.top_k(x, 4)[0])

    found = {eqn.primitive.name for eqn in equations(jax.make_jaxpr(dear)(jnp.ones((8, 8))).jaxpr)}
    assert found >= DEAR - {"ffi_call"} | {"dot_general"}


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5"])
def test_a_program_does_not_grow_with_its_layers(family: str) -> None:
    def products_of(num_layers: int, share: bool) -> int:
        lm = make_model(tiny_hf_config(family, num_layers))
        inputs = tiny_contexts(3, 7, 9) if family == "t5" else tiny_prompts(3, 11)
        policy = lm.policy(share_layers=share)

        def run(params: Any) -> Any:
            return policy.branch(params, {}, policy.trunk({}, inputs), inputs, None).policy.sum()

        shapes = jax.eval_shape(lm.init, jax.random.key(0))
        text = jax.jit(jax.grad(run)).lower(shapes).as_text()
        # Equal functions of a module are written once. Arrays are written into stacks, gradients picked from them.
        calls = re.findall("call @(?!dynamic_(?:update_)?index_in_dim)", text)
        return text.count("stablehlo.dot_general") + len(calls)

    assert products_of(2, True) == products_of(6, True)
    assert products_of(6, False) > products_of(2, False) + 40


def test_gradients_are_picked_from_their_stacks_by_numbers_that_are_no_constants() -> None:
    """So the kernels of an optimizer, which read them, can be the same for all layers of a body."""
    _, params, frozen, _ = parts("gpt2")
    program = jax.make_jaxpr(jax.grad(lambda params: objective("gpt2", True)(params, frozen, None)[0]))(
        params
    )
    hidden = [
        eqn
        for eqn in equations(program.jaxpr)
        if eqn.primitive.name == "optimization_barrier" and eqn.outvars[0].aval.dtype == jnp.uint32
    ]
    assert len(hidden) == len(jax.tree.leaves(params["layers_0"]))


def test_stacks_are_written_at_numbers_that_are_no_constants() -> None:
    """So the kernels that write them can be the same for all layers of a body; the stack is `jnp.stack`'s."""
    layers = [jnp.full((2, 3), float(number)) for number in range(4)]
    text = jax.jit(layer_loop._stack_leaves).lower(*layers).as_text()
    assert text.count("stablehlo.optimization_barrier") == 1
    assert text.count("call @dynamic_update_index_in_dim") == len(layers)
    np.testing.assert_array_equal(jax.jit(layer_loop._stack_leaves)(*layers), jnp.stack(layers))


def test_rows_of_a_batch_have_gradients_of_their_own() -> None:
    """`vmap` over parameters and of the gradient, through a shared body."""
    _, params, frozen, _ = parts("gpt2")
    both = jax.tree.map(lambda x: jnp.stack([x, 1.1 * x]), params)
    gradient = jax.jit(jax.grad(lambda params: objective("gpt2", True)(params, frozen, None)[0]))
    together = jax.jit(jax.vmap(gradient))(both)
    for index in range(2):
        one = jax.tree.map(lambda x, index=index: x[index], (together, both))
        assert_close(one[0], gradient(one[1]))


def test_dropout_differs_by_layer_and_is_the_same_in_the_backward_pass() -> None:
    lm = make_model(tiny_hf_config("gpt2", 3, **DROPPING))
    params, prompts = lm.init(jax.random.key(0)), tiny_prompts(3, 11)
    # The same layer three times, that adds the same each time but for what is dropped.
    same = params | {f"layers_{index}": params["layers_0"] for index in range(3)}

    def run(remat: bool, params: Any, key: Any) -> Any:
        policy = lm.policy(share_layers=True, remat=remat)
        return jnp.sin(policy.branch(params, {}, None, prompts, key).policy).sum()

    graded = jax.jit(jax.value_and_grad(run, argnums=1), static_argnums=0)
    one, other = graded(False, same, jax.random.key(1)), graded(True, same, jax.random.key(1))
    assert_close(one, other)
    assert abs(graded(False, same, jax.random.key(2))[0] - one[0]) > 1e-3
    direction = jax.tree.map(lambda x: 1e-3 * x / (1 + np.abs(x).max()), one[1])
    there, back = (
        graded(False, jax.tree.map(lambda x, d, sign=sign: x + sign * d, same, direction), jax.random.key(1))[
            0
        ]
        for sign in (1.0, -1.0)
    )
    slope = sum(jax.tree.leaves(jax.tree.map(jnp.vdot, one[1], direction)))
    np.testing.assert_allclose(there - back, 2 * slope, rtol=2e-2)


def test_every_layer_of_a_body_drops_something_else() -> None:
    lm = make_model(tiny_hf_config("gpt2", 2, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.5))
    params = lm.init(jax.random.key(0))
    prompts = tiny_prompts(2, 4)

    def stream(num_layers: int) -> Any:
        """What two equal layers, each of which adds 1 everywhere and nothing else, make of a stream of zeros."""
        layer = jax.tree.map(jnp.zeros_like, params["layers_0"])
        layer["mlp"]["down"]["bias"] = jnp.ones_like(layer["mlp"]["down"]["bias"])
        own = jax.tree.map(jnp.zeros_like, params) | {"layers_0": layer, "layers_1": layer}
        own["final_norm"] = {"scale": jnp.ones(32), "bias": jnp.zeros(32)}
        policy = lm.policy(share_layers=True)
        return policy.branch(own, {}, None, prompts, jax.random.key(0)).policy

    # Sums of two are 0, 2 or 4 where the masks differ, and never 2 where they are the same.
    assert len(np.unique(np.round(jax.jit(stream, static_argnums=0)(2)[0, 0], 3))) == 3


def test_one_by_one_is_the_form_of_all_but_tpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PLAIN.shares_layers and not CPU.shares_layers and not GPU.shares_layers
    assert products() is CPU
    for name, wanted in (("gpu", GPU), ("tpu", PLAIN)):
        with monkeypatch.context() as there:
            there.setattr(products_module, "platform", lambda name=name: name)
            assert products() is wanted
    _, params, frozen, _ = parts("gpt2")
    lm, _, _, inputs = parts("gpt2")
    branch = lm.policy().branch
    jaxpr = jax.make_jaxpr(lambda params: branch(params, frozen, None, inputs, None).policy)(params)
    assert not [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("", []),
        ("a", [(0, 1, 1)]),
        ("abc", [(0, 1, 1), (1, 1, 1), (2, 1, 1)]),
        ("aaaa", [(0, 1, 4)]),
        ("ababab", [(0, 2, 3)]),
        ("aabaabaabaa", [(0, 1, 2), (2, 3, 3)]),
        ("baaa", [(0, 1, 1), (1, 1, 3)]),
        ("aababab", [(0, 1, 1), (1, 2, 3)]),
    ],
)
def test_find_runs(kinds: str, expected: list[tuple[int, int, int]]) -> None:
    assert find_runs(kinds) == [Run(*run) for run in expected]


def test_runs_are_the_layers_in_order_with_as_few_bodies_as_can_be() -> None:
    rng = np.random.default_rng(0)

    def least(kinds: tuple[Hashable, ...]) -> int:
        """Bodies, by trying every first run."""
        if not kinds:
            return 0
        found = [1 + least(kinds[1:])]
        for period in range(1, len(kinds) // 2 + 1):
            repeats = 2
            while kinds[: period * repeats] == kinds[:period] * repeats and period * repeats <= len(kinds):
                found.append(period + least(kinds[period * repeats :]))
                repeats += 1
        return min(found)

    for _ in range(40):
        kinds = tuple(rng.integers(0, 2, size=rng.integers(1, 9)).tolist())
        runs = find_runs(kinds)
        laid = [kinds[run.start : run.start + run.period] * run.repeats for run in runs]
        assert sum(laid, ()) == kinds
        assert sum(run.period for run in runs) == least(kinds)
