# SPDX-License-Identifier: Apache-2.0
"""DDPO of a U-Net on a (4, 2, 1) mesh: what lies on each device, and what the compiled update moves between them.

Nothing is run or allocated. All widths of the small U-Net differ from the sizes of the batch, so a shape tells what an
array is.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh

from jrl.learners.ddpo import init_ddpo_state, make_ddpo_update
from jrl.learners.ddpo_config import DDPOConfig
from jrl.mesh import abstract_mesh, batch_sharding, make_mesh, path_name, replicated, tree_shardings
from jrl.models.adapters.config import LoraConfig
from jrl.models.diffusion.clip_config import ClipTextConfig
from jrl.models.diffusion.clip_text import ClipText
from jrl.models.diffusion.unet import UNet
from jrl.models.diffusion.unet_config import UNetConfig
from jrl.ops.noise_schedule import NoiseSchedule
from jrl.rollout.diffuse import make_diffuse
from jrl.typing import DDPOBatch, DenoiserFns, Trajectories
from tests.diffusion_toy import LATENT, WIDTH, toy_denoiser
from tests.learners.batches import adam
from tests.mesh.hlo import Collective, Shape, collectives, entry_arguments
from tests.mesh.test_mesh_hlo import (
    FSDP,
    GRADIENT_AXES,
    REMATERIALIZED,
    alike,
    key_shape,
    on,
    shape,
    split_parameters,
    zeros,
)
from tests.models.diffusion.test_unet_config import SD15

pytestmark = pytest.mark.mesh

SIZES = (4, 2, 1)
SMALL_UNET = UNetConfig(
    block_out_channels=(24, 40),
    layers_per_block=1,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    cross_attention_dim=28,
    attention_head_dim=2,
    norm_num_groups=4,
)
SMALL_CLIP = ClipTextConfig(
    vocab_size=1000, hidden_size=24, intermediate_size=56, num_hidden_layers=1, num_attention_heads=2
)
SAMPLES, MINIBATCH, STEPS, EDGE, PROMPT = 32, 8, 3, 8, 5
REAL_EDGE, REAL_PROMPT = 64, 77
R4 = LoraConfig(r=4, lora_alpha=4, init_lora_weights="gaussian")
CONFIG = DDPOConfig(sample_num_steps=STEPS, sample_batch_size=SAMPLES, sample_num_batches_per_epoch=1)
SCHEDULE = NoiseSchedule(
    beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, steps_offset=1
)
ADAM_COPIES = 3
"""Parameters, and two moments of each."""
SMALL = 64
"""Elements up to which an array is a figure of each row or a bias, and may go anywhere."""


class Program(NamedTuple):
    """A compiled update.

    Attributes:
      compiled: The program.
      collectives: Of it.
      state: What it is given, and should give back, with shardings.
      stderr: What the compiler said.
      parameters: Shapes on one device and shapes there when whole over the fsdp axis, of all kernels of the U-Net.
    """

    compiled: Any
    collectives: list[Collective]
    state: Any
    stderr: str
    parameters: list[tuple[Shape, Shape]]


_programs: dict[str, Program] = {}


def functions(unet: UNet, lora: Any) -> DenoiserFns:
    """Of a model that only predicts."""

    def predict(params: Any, frozen: Any, latents: Any, timesteps: Any, context: Any) -> Any:
        base = params["unet"] if lora is None else frozen["unet"]
        adapter = None if lora is None else lora.variables(params["lora"])
        return unet.apply(base, adapter, latents, timesteps, context, dtype=jnp.float32, remat=False)

    def unused(*_: Any) -> Any:
        raise AssertionError("an update neither encodes nor decodes")

    return DenoiserFns(encode=unused, predict=predict, reference=unused, decode=unused)


def shapes_of(unet: UNet, *, full: bool) -> tuple[Any, Any, Any]:
    """(lora, state, frozen) of a run, the last two as shapes."""
    if full:
        lora, params, frozen = None, {"unet": unet.shapes}, {}
    else:
        lora = unet.bind_lora(R4)
        adapters = jax.eval_shape(lora.init, jax.random.key(0), unet.shapes)
        base = jax.tree.map(lambda leaf: shape(*leaf.shape, dtype=jnp.bfloat16), unet.shapes)
        params, frozen = {"lora": adapters}, {"unet": base}
    state = jax.eval_shape(lambda: init_ddpo_state(zeros(params), adam(), CONFIG))
    return lora, state, frozen


def bytes_on_one_device(tree: Any, mesh: Any) -> int:
    places = tree_shardings(mesh, tree)[0]
    return sum(
        math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf, place in zip(jax.tree.leaves(tree), jax.tree.leaves(places), strict=True)
    )


def test_memory_of_stable_diffusion() -> None:
    """Of 1.5 at its real size on (4, 2, 1): half of every kernel and of its moments; norms and biases are whole."""
    mesh = abstract_mesh(*SIZES, num_devices=8)
    unet = UNet(SD15)
    _, state, _ = shapes_of(unet, full=True)
    whole = 859_520_964
    vectors = sum(leaf.size for leaf in jax.tree.leaves(unet.shapes) if leaf.ndim == 1)
    # The bias of a gated layer has two axes; nothing splits it over fsdp either.
    gates = sum(leaf.size for leaf in jax.tree.leaves(unet.shapes) if leaf.ndim == 2 and leaf.shape[0] == 2)
    kept = vectors + gates
    held = bytes_on_one_device(state, mesh)
    assert 0 < held - 4 * ADAM_COPIES * (kept + (whole - kept) // 2) < 64  # counters
    assert round(held / 1e9, 2) == 5.16 and kept < 1e-3 * whole
    _, state, frozen = shapes_of(unet, full=False)
    held = bytes_on_one_device(state, mesh)
    assert 0 < held - 4 * ADAM_COPIES * 797_184 < 64
    assert bytes_on_one_device(frozen, mesh) == 2 * (kept + (whole - kept) // 2)


@pytest.fixture(params=["full", "lora"])
def program(request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]) -> Program:
    """The update, compiled once for all tests."""
    if request.param not in _programs:
        capfd.readouterr()
        mesh = make_mesh(*SIZES)
        compiled, state, frozen = compiled_update(
            mesh, SMALL_UNET, edge=EDGE, prompt=PROMPT, full=request.param == "full"
        )
        stderr = capfd.readouterr().err
        parameters = split_parameters(mesh, state.train.params if request.param == "full" else frozen)
        found = collectives(compiled.as_text(), mesh)
        _programs[request.param] = Program(compiled, found, state, stderr, parameters)
    return _programs[request.param]


def compiled_update(
    mesh: Mesh, config: UNetConfig, *, edge: int, prompt: int, full: bool
) -> tuple[Any, Any, Any]:
    """(program, state, frozen): as a run compiles it, from shapes alone."""
    unet, width = UNet(config), config.cross_attention_dim
    lora, state, frozen = shapes_of(unet, full=full)
    update = make_ddpo_update(
        functions(unet, lora), SCHEDULE, adam(), CONFIG, batch_size=SAMPLES // 2, minibatch_size=MINIBATCH
    )
    latents = shape(SAMPLES, STEPS + 1, edge, edge, 4)
    trajectories = Trajectories(latents, shape(SAMPLES, STEPS), shape(SAMPLES, prompt, width))
    rows = on(mesh, (trajectories, shape(SAMPLES)), batch_sharding(mesh))
    batch = DDPOBatch(rows[0], on(mesh, shape(1, prompt, width), replicated(mesh)), rows[1])
    state, frozen, key = on(mesh, state), on(mesh, frozen), on(mesh, key_shape(), replicated(mesh))
    places = jax.tree.map(lambda x: x.sharding, state)
    with jax.set_mesh(mesh):
        jitted = jax.jit(update, donate_argnums=0, out_shardings=(places, replicated(mesh)))
        return jitted.lower(state, frozen, batch, key).compile(), state, frozen


@pytest.mark.parametrize("full", [True, False], ids=["full", "lora"])
def test_denoising_gathers_every_parameter_once(full: bool) -> None:
    """And not for every step."""
    mesh, unet, width = make_mesh(*SIZES), UNet(SMALL_UNET), SMALL_UNET.cross_attention_dim
    lora, state, frozen = shapes_of(unet, full=full)
    model = replace(
        functions(unet, lora),
        encode=lambda frozen, tokens: jnp.zeros((*tokens.shape, width)),
        decode=lambda frozen, latents: latents[..., :3],
    )
    diffuse = make_diffuse(
        model,
        SCHEDULE,
        num_steps=STEPS,
        eta=1.0,
        guidance_scale=2.0,
        guidance_rescale=0.0,
        latent_shape=(EDGE, EDGE, 4),
    )
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), SAMPLES))
    rows = on(mesh, (shape(SAMPLES, PROMPT, dtype=jnp.int32), keys), batch_sharding(mesh))
    negative = on(mesh, shape(1, PROMPT, width), replicated(mesh))
    params, frozen = on(mesh, state.train.params), on(mesh, frozen)
    with jax.set_mesh(mesh):
        lowered = jax.jit(diffuse).lower(params, frozen, rows[0], negative, rows[1], rows[1])
        found = collectives(lowered.compile().as_text(), mesh)
    wanted = [whole for _, whole in split_parameters(mesh, params if full else frozen)]
    gathered = [one for one in found if one.kind == "all-gather" and one.axes == FSDP]
    assert {one.place for one in gathered} == {()}
    assert sum(len(one.shapes) for one in gathered) == len(wanted)


def test_prompts_are_encoded_with_weights_as_they_lie() -> None:
    """They are read once, outside the loop: whole, a T5-XXL would fill a device."""
    given, read = [], []

    def encode(frozen: Any, tokens: Any) -> Any:
        read.append(frozen["text_encoder"])
        return jnp.zeros((*tokens.shape, WIDTH))

    def run(frozen: Any, *rest: Any) -> Any:
        given.append(frozen["text_encoder"])
        return diffuse({}, frozen, *rest)

    diffuse = make_diffuse(
        replace(toy_denoiser(), encode=encode, predict=lambda params, frozen, latents, *_: latents),
        SCHEDULE,
        num_steps=STEPS,
        eta=1.0,
        guidance_scale=1.0,
        guidance_rescale=0.0,
        latent_shape=LATENT,
    )
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), SAMPLES))
    tokens, negative = shape(SAMPLES, PROMPT, dtype=jnp.int32), shape(1, PROMPT, WIDTH)
    with jax.set_mesh(make_mesh(*SIZES)):
        jax.eval_shape(run, {"text_encoder": shape(8, 8)}, tokens, negative, keys, keys)
    assert read[0] is given[0]


def test_clip_has_its_table_whole_and_sends_nothing_for_a_lookup() -> None:
    mesh, text = make_mesh(*SIZES), ClipText(SMALL_CLIP)
    params = on(mesh, jax.eval_shape(text.init, jax.random.key(0)))
    tokens = on(mesh, shape(SAMPLES, PROMPT, dtype=jnp.int32), batch_sharding(mesh))
    with jax.set_mesh(mesh):
        program = jax.jit(partial(text.encode, dtype=jnp.float32)).lower(params, tokens).compile()
    assert not collectives(program.as_text(), mesh)


def large(found: list[Collective], *kinds: str) -> list[tuple[Shape, frozenset[str]]]:
    """(shape, axes) of every array of these collectives that counts.

    Left out is the embedded timestep, one vector a row: where that is less than a kernel, the compiler sums parts of
    its product with the split kernel in place of gathering it.
    """
    pairs = ((shape, one.axes) for one in found if one.kind in kinds for shape in one.shapes)
    pairs = ((shape, axes) for shape, axes in pairs if math.prod(shape) > SMALL)
    rows = 2 * MINIBATCH // SIZES[0]
    return [
        (shape, axes) for shape, axes in pairs if not (axes == FSDP and len(shape) == 2 and shape[0] == rows)
    ]


def test_only_parameters_are_gathered_and_inside_the_loop(program: Program) -> None:
    """Neither latents nor activations nor what was sampled meets on one device."""
    wholes = alike(whole for _, whole in program.parameters)
    gathers = large(program.collectives, "all-gather")
    # A bias that an optimizer step made in parts lies whole again at its end.
    gathers = [(found, axes) for found, axes in gathers if len(found) > 1]
    assert len(wholes & alike(found for found, _ in gathers)) > len(wholes) / 2
    for found, axes in gathers:
        assert axes == FSDP and alike([found]) <= wholes, (found, axes)
    outside = [one for one in program.collectives if one.place == () and one.kind == "all-gather"]
    assert not wholes & alike(found for one in outside for found in one.shapes)


def test_a_kernel_of_a_convolution_is_gathered_once_for_a_pass_and_its_gradient(program: Program) -> None:
    kernels = Counter(tuple(sorted(whole)) for _, whole in program.parameters if len(whole) == 4)
    gathers = [found for found, axes in large(program.collectives, "all-gather") if axes == FSDP]
    found = Counter(tuple(sorted(shape)) for shape in gathers)
    assert kernels and all(found[shape] <= count for shape, count in kernels.items()), (found, kernels)


def test_gradients_are_reduced_and_nothing_else_but_a_microbatch(program: Program) -> None:
    trained = jax.tree.leaves(program.state.train.params)
    sizes = {part_size(leaf) for leaf in trained} | {leaf.size for leaf in trained}
    # Latents before and after a step, and contexts, from the devices that hold the samples.
    rows = {(MINIBATCH, EDGE, EDGE, 4), (MINIBATCH, PROMPT, 28)}
    reduced: dict[int, set[str]] = {}
    for found, axes in large(program.collectives, "all-reduce", "reduce-scatter"):
        assert axes <= GRADIENT_AXES, (found, axes)
        if found not in rows:
            assert math.prod(found) in sizes, (found, axes)
            reduced[math.prod(found)] = reduced.get(math.prod(found), set()) | axes
    for path, leaf in jax.tree_util.tree_leaves_with_path(program.state.train.params):
        # Rows of the embedded timestep have met over fsdp already.
        wanted = {"data"} if "time_emb" in path_name(path) else GRADIENT_AXES
        if leaf.size > SMALL:
            axes = reduced.get(leaf.size, set()) | reduced.get(part_size(leaf), set())
            assert wanted <= axes, path
    assert not large(program.collectives, "all-to-all", "collective-permute")


def part_size(leaf: Any) -> int:
    """Elements of a leaf on one device."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape))


def test_state_comes_and_goes_split(program: Program) -> None:
    given = entry_arguments(program.compiled.as_text())
    wanted = [
        leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(program.state) if leaf.ndim > 1
    ]
    for part in set(wanted):
        assert given.count(part) >= wanted.count(part), part
    returned = program.compiled.output_shardings[0]
    for leaf, sharding in zip(jax.tree.leaves(program.state), jax.tree.leaves(returned), strict=True):
        assert sharding.shard_shape(leaf.shape) == leaf.sharding.shard_shape(leaf.shape), leaf


def test_nothing_is_rematerialized(program: Program) -> None:
    assert REMATERIALIZED not in program.stderr


@pytest.mark.slow
@pytest.mark.parametrize("full", [True, False], ids=["full", "lora"])
def test_stable_diffusion_moves_only_gradients_and_samples_over_data(full: bool) -> None:
    """At its real size, compiled from shapes alone.

    With one sample a device, a kernel of the coarsest level is larger than what it is applied to, so the two devices of
    an fsdp pair may exchange rows there; a device never gets rows, or anything but sums, from the others.
    """
    mesh = make_mesh(*SIZES)
    compiled, state, _ = compiled_update(mesh, SD15, edge=REAL_EDGE, prompt=REAL_PROMPT, full=full)
    trained = jax.tree.leaves(state.train.params)
    sizes = {part_size(leaf) for leaf in trained} | {leaf.size for leaf in trained}
    samples = {MINIBATCH * REAL_EDGE**2 * 4, MINIBATCH * REAL_PROMPT * SD15.cross_attention_dim}
    seen = set()
    for one in collectives(compiled.as_text(), mesh):
        for found in one.shapes:
            if "data" in one.axes and math.prod(found) > SMALL:
                assert one.kind in ("all-reduce", "reduce-scatter"), (one.kind, found)
                assert math.prod(found) in sizes | samples, (one.kind, found)
                seen.add(math.prod(found))
    assert samples <= seen and len(seen) > len(sizes) / 3
