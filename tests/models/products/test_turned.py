# SPDX-License-Identifier: Apache-2.0
"""Kernels turned for the loop over tokens: the same products, the same samples, and where it is done."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.mesh import abstract_mesh, make_mesh
from jrl.models.adapters import LoraConfig
from jrl.models.products import loop_weights, turned
from jrl.models.products.cpu import FEWEST_ROWS, LEAST_SIZE, MOST_ROWS
from jrl.models.products.turned import TurnedKernel, turn_kernels
from jrl.models.quantize import quantize_frozen
from jrl.rollout.generate import make_generate
from jrl.rollout.sampler import GenerationSettings, Sampler
from jrl.typing import Completions, ModelInputs, PolicyFns
from jrl.typing.language import as_they_are
from tests.rollout.programs import knobs
from tests.tiny import PAD_ID, tiny_contexts, tiny_lm, tiny_policy, tiny_prompts

# Rows, inputs and outputs of the kinds of kernels: MLP, queries, attention's output.
SHAPES = [((4, 1), (6,), (10,)), ((4, 1), (6,), (2, 3)), ((4, 1), (2, 3), (6,)), ((4,), (6,), (10,))]
EDGE = 728  # the square is just large enough
TOKENS = 16


def turn(kernel: jax.Array, num_inputs: int) -> TurnedKernel:
    outputs = tuple(range(num_inputs, kernel.ndim))
    return TurnedKernel(kernel.transpose(*outputs, *range(num_inputs)), num_inputs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_the_product_is_that_of_the_kernel(
    rows: tuple[int, ...], inputs: tuple[int, ...], outputs: tuple[int, ...], dtype: str
) -> None:
    draws = np.random.default_rng(0)
    x = jnp.asarray(draws.normal(size=(*rows, *inputs)), dtype)
    kernel = jnp.asarray(draws.normal(size=(*inputs, *outputs)), jnp.float32)
    stored = turn(kernel, len(inputs))
    np.testing.assert_array_equal(stored.astype(jnp.float32), kernel)
    found = jax.jit(lambda x, kernel: kernel.product(x, jnp.float32))(x, stored)
    assert found.dtype == jnp.float32
    wanted = np.tensordot(np.float64(x), np.float64(kernel.astype(dtype)), len(inputs))
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def tree(dtype: Any = jnp.float32) -> dict[str, Any]:
    """Leaves that are turned, and after them leaves that are not."""

    def kernel(*shape: int) -> dict[str, Any]:
        return {"kernel": jnp.zeros(shape, dtype)}

    block = {
        "attn": {"q": kernel(EDGE, 4, EDGE // 4), "o": kernel(4, EDGE // 4, EDGE), "k": kernel(EDGE, 4, 8)},
        "mlp": {"up": kernel(EDGE, EDGE) | {"bias": jnp.zeros(EDGE)}},
        "shared_mlp": {"down": kernel(EDGE, EDGE)},
        "experts": {"up": jnp.zeros((2, EDGE, EDGE), dtype)},
    }
    return {
        "layers_0": block,
        "value_branch": {"layers_0": {"mlp": {"down": kernel(EDGE, EDGE)}}},
        "lm_head": kernel(EDGE, 2 * EDGE),
        "embed": {"embedding": jnp.zeros((EDGE, EDGE), dtype)},
        "q_heads": {"head_0": {"out": kernel(EDGE, EDGE)}},
    }


def turned_paths(weights: Any) -> dict[str, tuple[int, ...]]:
    """Paths of the turned leaves, and their shapes as they lie."""
    leaves = jax.tree.leaves_with_path(weights, is_leaf=lambda leaf: isinstance(leaf, TurnedKernel))
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.values.shape
        for path, leaf in leaves
        if isinstance(leaf, TurnedKernel)
    }


class TestWhichAreTurned:
    def test_large_kernels_of_the_blocks_and_of_the_head(self):
        assert EDGE * EDGE >= LEAST_SIZE
        assert turned_paths(turn_kernels(tree(), 8, 48)) == {
            "layers_0/attn/q/kernel": (4, EDGE // 4, EDGE),
            "layers_0/attn/o/kernel": (EDGE, 4, EDGE // 4),
            "layers_0/mlp/up/kernel": (EDGE, EDGE),
            "layers_0/shared_mlp/down/kernel": (EDGE, EDGE),
            "value_branch/layers_0/mlp/down/kernel": (EDGE, EDGE),
            "lm_head/kernel": (2 * EDGE, EDGE),
        }

    def test_of_latent_attention_all_but_what_a_step_reads_as_whole_arrays(self):
        names = ("q_down", "q_up", "kv_down", "k_up", "v_up", "k_rope")
        latent = {name: {"kernel": jnp.zeros((EDGE, EDGE))} for name in names}
        found = turned_paths(turn_kernels({"layers_0": {"attn": latent}}, 8, 48))
        assert [path.split("/")[2] for path in found] == sorted({*names} - {"k_up", "v_up"})

    @pytest.mark.parametrize(
        ("rows", "some"),
        [(FEWEST_ROWS - 1, False), (FEWEST_ROWS, True), (MOST_ROWS, True), (MOST_ROWS + 1, False)],
    )
    def test_for_a_few_rows(self, rows, some):
        assert bool(turned_paths(turn_kernels(tree(), rows, 48))) is some

    @pytest.mark.parametrize(("tokens", "some"), [(15, False), (16, True)])
    def test_for_as_many_tokens_as_pay_for_the_copies(self, tokens, some):
        assert bool(turned_paths(turn_kernels(tree(), 8, tokens))) is some

    def test_not_in_fewer_bits(self):
        assert not turned_paths(turn_kernels(tree(jnp.bfloat16), 8, 48))
        pytest.importorskip("qwix")
        rounded = quantize_frozen(tree(), "int8")
        assert jax.tree.structure(turn_kernels(rounded, 8, 48)) == jax.tree.structure(rounded)

    @pytest.mark.parametrize(("devices", "some"), [(1, True), (2, False)])
    def test_not_on_a_mesh_of_several_devices(self, devices, some):
        """Every trainer has a mesh in force, and be it of one device."""
        with jax.sharding.use_abstract_mesh(abstract_mesh(num_devices=devices)):
            assert bool(turned_paths(turn_kernels(tree(), 8, 48))) is some

    def test_not_on_an_accelerator(self, monkeypatch):
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        assert not turned_paths(loop_weights(tree(), 8, 48))

    @pytest.mark.parametrize("use_dora", [False, True])
    def test_not_where_an_adapter_reads_their_norms(self, use_dora):
        lm, _ = tiny_lm("llama")
        policy = lm.policy(adapter=LoraConfig(r=2, target_modules=("q_proj",), use_dora=use_dora))
        assert bool(turned_paths(policy.loop_weights(tree(), 8, 48))) is not use_dora


@functools.cache
def adapted() -> tuple[PolicyFns, Any, Any]:
    """LoRA on kernels of the blocks and on the head."""
    lm, whole = tiny_lm("llama")
    split: dict[str, Any] = {"adapter": LoraConfig(r=2, target_modules=("q_proj", "o_proj", "lm_head"))}
    params, frozen = lm.split_params(whole, key=jax.random.key(0), **split)
    return lm.policy(**split), jax.tree.map(lambda x: x + 0.1, params), frozen


def case(name: str) -> tuple[PolicyFns, Any, Any, ModelInputs]:
    prompts = tiny_contexts(8) if name == "t5" else tiny_prompts(8)
    if name == "lora":
        return *adapted(), prompts
    family, unfrozen, branch = {"hydra": ("llama", 1, 0), "branch": ("llama", -1, 1)}.get(name, (name, -1, 0))
    policy, params, frozen, _ = tiny_policy(family, unfrozen, num_value_layers_unfrozen=branch)
    return policy, params, frozen, prompts


def sample(policy: PolicyFns, params: Any, frozen: Any, prompts: ModelInputs) -> tuple[Completions, str]:
    """16 tokens a row, and the compiled program."""
    generate = jax.jit(make_generate(policy, max_new_tokens=TOKENS, eos_token_ids=(), pad_token_id=PAD_ID))
    arguments = (params, frozen, prompts, np.arange(8, dtype=np.int32), knobs(), jax.random.key(0))
    return generate(*arguments), generate.lower(*arguments).compile().as_text()


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "hydra", "branch", "lora"])
def test_samples_are_those_of_the_kernels_as_they_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model, with every kernel called large."""
    policy, params, frozen, prompts = case(name)
    monkeypatch.setattr(turned, "LEAST_SIZE", 1)
    wanted, plain = sample(dataclasses.replace(policy, loop_weights=as_they_are), params, frozen, prompts)
    found, program = sample(policy, params, frozen, prompts)
    assert turned_paths(policy.loop_weights({**frozen, **params}, 8, TOKENS))
    assert plain != program
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=1e-5)


def reached(program: str, names: set[str]) -> list[str]:
    """Lines of these computations of a compiled program and of all that they call."""
    blocks = {
        name: body.splitlines()
        for name, body in re.findall(
            r"^(?:ENTRY )?%([\w.\-]+) \(.*?\{\n(.*?)^\}", program, re.DOTALL | re.MULTILINE
        )
    }
    todo, done = list(names), set()
    while todo:
        name = todo.pop()
        if name not in done:
            done.add(name)
            calls = re.findall(r"(?:calls|to_apply|body|condition)=%([\w.\-]+)", "\n".join(blocks[name]))
            branches = re.findall(r"branch_computations=\{([^}]*)\}", "\n".join(blocks[name]))
            todo += calls + [part.strip(" %") for branch in branches for part in branch.split(",")]
    return [line for name in done for line in blocks[name]]


def copies(lines: list[str]) -> list[str]:
    """Those that lay out the kernel of `up`, (32, 64), anew."""
    return [line for line in lines if re.search(r"= f32\[(32,64|64,32)\]\S* (copy|transpose)\(", line)]


def test_in_the_loop_the_kernel_is_read_as_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read off the compiled program: products have it on the left, and all copies of it lie before the loop."""
    monkeypatch.setattr(turned, "LEAST_SIZE", 1)
    program = sample(*case("gpt2"))[1]
    products = set(
        re.findall(
            r"= f32\[([\d,]+)\]\S* dot\(.*run_layers/layers_0/[\w./]+/(\w+)/\w+._product/dot_general", program
        )
    )
    assert {("32,8", "q"), ("32,8", "o"), ("64,8", "up"), ("32,8", "down")} <= products
    bodies = set(re.findall(r" while\(.*body=%([\w.\-]+)", program))
    assert not copies(reached(program, bodies))
    assert copies(program.splitlines())


def test_the_sampler_of_a_trainer_turns_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer has a mesh in force, and be it of one device."""
    monkeypatch.setattr(turned, "LEAST_SIZE", 1)
    policy, params, frozen, prompts = case("gpt2")
    mesh = make_mesh(devices=jax.devices()[:1])
    settings = GenerationSettings(max_new_tokens=TOKENS, eos_token_id=(), pad_token_id=PAD_ID)
    program = Sampler(policy, mesh=mesh).program(settings, 8)
    with jax.set_mesh(mesh):
        traced = program.trace(params, frozen, prompts, np.arange(8), knobs(), jax.random.key(0)).jaxpr
    # One a kernel: q, k, v, o, up and down of two layers.
    assert str(traced).count("optimization_barrier") == 12
