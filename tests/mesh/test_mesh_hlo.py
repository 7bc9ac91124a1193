# SPDX-License-Identifier: Apache-2.0
"""What the compiler made of the updates and the sampler on a (2, 2, 2) mesh, read off the optimized program.

Nothing is run or allocated. All sizes of the model differ from those of the batch, so a shape tells what an array is.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from transformers import LlamaConfig

from jrl.forward import Reader
from jrl.learners.dpo import init_dpo_state, make_dpo_update
from jrl.learners.dpo_config import DPOConfig
from jrl.learners.ilql import ILQLConfig, init_ilql_state, make_ilql_update
from jrl.learners.ppo import PPOConfig
from jrl.learners.sft import make_sft_update
from jrl.learners.state import init_train_state
from jrl.mesh import batch_sharding, make_mesh, replicated
from jrl.models.heads import init_q_heads, init_value_head
from jrl.models.model import make_model
from jrl.rollout.generate import make_generate
from jrl.typing import (
    ILQLBatch,
    ModelInputs,
    PreferenceBatch,
    Rollouts,
    SamplingKnobs,
    Scored,
    Sequences,
)
from tests.learners.batches import adam
from tests.learners.ppo_parts import ppo_state, ppo_update
from tests.mesh.hlo import Collective, Shape, collectives, entry_arguments, loop_carries
from tests.mesh.shapes import key_shape, on, shape

pytestmark = pytest.mark.mesh

REMATERIALIZED = "Involuntary full rematerialization"
CONFIG = LlamaConfig(
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=112,
    vocab_size=1000,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)
PADDED_VOCAB = 1024
ROWS, MINIBATCH, PROMPT, WIDTH = 32, 8, 13, 13  # so long that no number of tokens is a width of the model
LENGTH = PROMPT + WIDTH
PLAIN, CHUNKED = 1 << 28, 16384
"""Bytes of logits: all at once, and four columns of a microbatch at a time."""
SMALL = 8 * LENGTH
"""Elements below which an array is a figure a token, and may go anywhere."""
FSDP, TENSOR, GRADIENT_AXES = {"fsdp"}, {"tensor"}, {"data", "fsdp"}
CASES = {
    "ppo": (-1, PLAIN),
    "ppo_hydra": (1, CHUNKED),
    "sft": (-1, CHUNKED),
    "dpo": (1, PLAIN),
    "ilql": (-1, CHUNKED),
    "sft_shared": (-1, CHUNKED),
}
"""Layers that train, and bytes of logits. Layers share a body where a name says it."""


class Program(NamedTuple):
    """A compiled update.

    Attributes:
      compiled: The program.
      collectives: Of it.
      state: What it is given, and should give back, with shardings.
      stderr: What the compiler said.
      parameters: Shapes on one device and shapes there when whole over the fsdp axis, of all kernels and tables.
    """

    compiled: Any
    collectives: list[Collective]
    state: Any
    stderr: str
    parameters: list[tuple[Shape, Shape]]


_programs: dict[str, Program] = {}


def model(name: str, unfrozen: int) -> tuple[Any, Any, Any]:
    """(policy, params, frozen), the last two as shapes, with the heads that an algorithm needs."""
    lm = make_model(CONFIG)

    def init(key: jax.Array) -> Any:
        params = lm.init(key)
        if name in ("ppo", "ppo_hydra", "ilql"):
            params = {**params, "v_head": init_value_head("mlp", lm.feature_width, key)}
        if name == "ilql":
            sizes = lm.feature_width, lm.vocab_size, lm.config.padded_vocab_size
            params = {**params, **init_q_heads(2, *sizes, key)}
        return lm.split_params(params, num_layers_unfrozen=unfrozen)

    params, frozen = jax.eval_shape(init, key_shape())
    policy = lm.policy(num_layers_unfrozen=unfrozen, share_layers=name.endswith("_shared"))
    return policy, params, frozen


def update(name: str) -> tuple[Any, Any, Any, Any]:
    """(update, state, frozen, batch) of a case, all but the first as shapes."""
    unfrozen, chunk_bytes = CASES[name]
    policy, params, frozen = model(name, unfrozen)
    inputs = ModelInputs(shape(ROWS, LENGTH, dtype=jnp.int32), shape(ROWS, LENGTH, dtype=bool))
    figures, mask = shape(ROWS, WIDTH), shape(ROWS, WIDTH, dtype=bool)
    rows = Sequences(inputs, shape(ROWS, dtype=jnp.int32), mask)
    cut, reader = dict(batch_size=ROWS, minibatch_size=MINIBATCH), Reader(policy, chunk_bytes=chunk_bytes)
    if name.startswith("ppo"):
        config = PPOConfig(ppo_epochs=2)
        cut["batch_size"] = ROWS // 2
        made = ppo_update(policy, adam(), config, temperature=1.0, logprob_chunk_bytes=chunk_bytes, **cut)
        state = jax.eval_shape(lambda: ppo_state(zeros(params), adam(), config))
        return made, state, frozen, Rollouts(rows, Scored(figures, figures, figures), figures)
    if name == "ilql":
        made = make_ilql_update(reader, adam(), ILQLConfig(steps_for_target_q_sync=1), **cut)
        state = jax.eval_shape(lambda: init_ilql_state(zeros(params), adam()))
        batch = ILQLBatch(inputs, shape(ROWS, WIDTH, dtype=jnp.int32), mask, figures)
        return made, state, frozen, batch
    if name == "dpo":
        made = make_dpo_update(reader, adam(), DPOConfig(), **cut)
        state = jax.eval_shape(lambda: init_dpo_state(zeros(params), adam(), None))
        sums = shape(ROWS, WIDTH)
        return made, state, frozen, PreferenceBatch(rows, rows, shape(ROWS, dtype=bool), sums, sums)
    state = jax.eval_shape(lambda: init_train_state(zeros(params), adam()))
    return make_sft_update(reader, adam(), **cut), state, frozen, rows


def zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


@pytest.fixture(params=CASES)
def program(request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]) -> Program:
    """The update of a case, compiled once for all tests."""
    if request.param not in _programs:
        mesh = make_mesh(2, 2, 2)
        made, state, frozen, batch = update(request.param)
        state, frozen, batch = on(mesh, state), on(mesh, frozen), on(mesh, batch, batch_sharding(mesh))
        key = on(mesh, key_shape(), replicated(mesh))
        with jax.set_mesh(mesh):
            capfd.readouterr()
            # As a run compiles it.
            places = jax.tree.map(lambda x: x.sharding, state)
            jitted = jax.jit(made, donate_argnums=0, out_shardings=(places, replicated(mesh)))
            compiled = jitted.lower(state, frozen, batch, key).compile()
            stderr = capfd.readouterr().err
        found = collectives(compiled.as_text(), mesh)
        parameters = split_parameters(mesh, (params_of(state), frozen))
        _programs[request.param] = Program(compiled, found, state, stderr, parameters)
    return _programs[request.param]


def params_of(state: Any) -> Any:
    """Everything of a state that is laid out like parameters, but the optimizer's own."""
    train = state.train if hasattr(state, "train") else state
    return train.params


def split_parameters(mesh: Mesh, tree: Any) -> list[tuple[Shape, Shape]]:
    """(on one device, there when whole over fsdp) of every parameter that the table splits over fsdp."""
    found = []
    for leaf in jax.tree.leaves(tree):
        part = leaf.sharding.shard_shape(leaf.shape)
        kept = [None if axes == "fsdp" else axes for axes in leaf.sharding.spec]
        whole = NamedSharding(mesh, jax.P(*kept)).shard_shape(leaf.shape)
        if part != whole:
            found.append((part, whole))
    assert found
    return found


def alike(shapes: Any) -> set[Shape]:
    """Shapes up to the order of their dimensions and those of size 1, which a compiler changes as it likes."""
    return {tuple(sorted(size for size in shape if size > 1)) for shape in shapes}


def large(found: list[Collective], kinds: tuple[str, ...]) -> list[tuple[Shape, frozenset[str]]]:
    """(shape, axes) of every array of these collectives that is more than a figure a token."""
    pairs = ((shape, one.axes) for one in found if one.kind in kinds for shape in one.shapes)
    return [(shape, axes) for shape, axes in pairs if math.prod(shape) > SMALL]


def test_no_collective_holds_the_whole_vocabulary(program: Program) -> None:
    """Neither logits nor their gradients, of all positions or of a chunk: rows and vocabulary stay split."""
    tables = alike(whole for _, whole in program.parameters)
    for one in program.collectives:
        for found in one.shapes:
            assert PADDED_VOCAB not in found, one
            is_table = alike([found]) <= tables or alike([found]) <= alike(x for x, _ in program.parameters)
            assert PADDED_VOCAB // 2 not in found or is_table or len(found) == 1, one


def test_parameters_are_gathered_one_at_a_time_over_fsdp(program: Program) -> None:
    wholes = alike(whole for _, whole in program.parameters)
    gathers = large(program.collectives, ("all-gather",))
    assert wholes & alike(found for found, _ in gathers)
    for found, axes in gathers:
        if axes == TENSOR:  # what a head's hidden layer made of a device's own rows
            assert found[0] <= MINIBATCH // 4 and PADDED_VOCAB // 2 not in found, found
        else:
            assert axes == FSDP and alike([found]) <= wholes, (found, axes)
    assert all(len(one.shapes) == 1 for one in program.collectives if one.kind == "all-gather")


def test_they_are_gathered_inside_the_loop_over_microbatches(program: Program) -> None:
    """Gathered before it, the whole model would lie on every device until the loop's end."""
    wholes = alike(whole for _, whole in program.parameters)
    outside = [one for one in program.collectives if one.place == () and one.kind == "all-gather"]
    assert not wholes & alike(found for one in outside for found in one.shapes)
    heads = alike([(48, PADDED_VOCAB // 2), (96, PADDED_VOCAB // 2), (48, 48)])
    for carried in loop_carries(program.compiled.as_text()):
        # A loop over chunks of positions may hold the heads that it reads.
        assert not (wholes - heads) & alike(carried)
        assert not alike([(ROWS, LENGTH, 48)]) & alike(carried), (
            "the trunk's output of all rows on every device"
        )


@pytest.mark.parametrize("program", ["ilql"], indirect=True)
def test_of_target_heads_what_is_found_moves(program: Program) -> None:
    """Online heads are gathered: to be read, to be read again, and for the gradient. Targets, as large, are not."""
    gathers = large(program.collectives, ("all-gather",))
    assert [axes for found, axes in gathers if alike([found]) == alike([(96, PADDED_VOCAB // 2)])] == [
        FSDP
    ] * 6
    assert any(one.kind == "all-to-all" and one.axes == FSDP for one in program.collectives)


def test_gradients_are_reduced_over_data_and_fsdp(program: Program) -> None:
    reductions = large(program.collectives, ("all-reduce", "reduce-scatter"))
    parts, wholes = (alike(side) for side in zip(*program.parameters, strict=True))
    seen: dict[Shape, set[str]] = {}
    for found, axes in reductions:
        (one,) = alike([found])
        if (
            axes == TENSOR
        ):  # products of split kernels with the device's own rows, whose tokens may be merged with them
            assert found[0] <= 2 * MINIBATCH // 4 * LENGTH and one not in parts | wholes, found
        elif found[1:] == (LENGTH, 48):  # a microbatch's rows of the trunk's output, from who has them
            assert axes <= GRADIENT_AXES and found[0] <= MINIBATCH
        elif len(found) == 1:  # a bias, which lies whole
            assert axes <= GRADIENT_AXES
        else:
            assert axes <= GRADIENT_AXES and one in parts | wholes, (found, axes)
            seen[one] = seen.get(one, set()) | axes
    trained = split_parameters(make_mesh(2, 2, 2), params_of(program.state))
    for part, whole in trained:
        axes = set().union(*(seen.get(one, set()) for one in alike([part, whole])))
        assert axes == GRADIENT_AXES, (whole, axes)


def test_parameters_and_optimizer_state_come_and_go_split(program: Program) -> None:
    given = entry_arguments(program.compiled.as_text())
    wanted = [
        leaf.sharding.shard_shape(leaf.shape)
        for leaf in jax.tree.leaves(program.state)
        if leaf.dtype == jnp.float32 and math.prod(leaf.shape) > SMALL
    ]
    for part in set(wanted):
        assert given.count(part) >= wanted.count(part), part
    moments = [leaf.shape for leaf in jax.tree.leaves(optax.tree.get(opt_state_of(program.state), "mu"))]
    assert wanted.count((24, 56)) >= 3 and (48, 112) in moments
    returned = program.compiled.output_shardings[0]
    for leaf, sharding in zip(jax.tree.leaves(program.state), jax.tree.leaves(returned), strict=True):
        assert sharding.shard_shape(leaf.shape) == leaf.sharding.shard_shape(leaf.shape), leaf


def opt_state_of(state: Any) -> Any:
    return (state.train if hasattr(state, "train") else state).opt_state


def test_nothing_is_rematerialized(program: Program) -> None:
    assert REMATERIALIZED not in program.stderr


def test_the_sampler_gathers_every_parameter_once() -> None:
    """Not for the prompt and for the tokens apart, and not for every token."""
    mesh = make_mesh(2, 2, 2)
    policy, params, frozen = model("ppo", -1)
    generate = make_generate(policy, max_new_tokens=WIDTH, eos_token_ids=(1,), pad_token_id=0)
    prompts = ModelInputs(shape(ROWS, PROMPT, dtype=jnp.int32), shape(ROWS, PROMPT, dtype=bool))
    rows = on(mesh, (prompts, shape(ROWS, dtype=jnp.int32)), batch_sharding(mesh))
    knobs, key = on(mesh, (SamplingKnobs(shape(), shape()), key_shape()), replicated(mesh))
    params, frozen = on(mesh, params), on(mesh, frozen)
    with jax.set_mesh(mesh):
        compiled = jax.jit(generate).lower(params, frozen, *rows, knobs, key).compile()
    found = [one for one in collectives(compiled.as_text(), mesh) if one.kind == "all-gather"]
    read = {name: tree for name, tree in params.items() if name != "v_head"}
    wanted = [whole for _, whole in split_parameters(mesh, read)]
    gathered = [one for one in found if one.axes == FSDP and alike(one.shapes) <= alike(wanted)]
    assert len(gathered) == len(wanted)
    assert {one.place for one in gathered} == {()}
