# SPDX-License-Identifier: Apache-2.0
"""One device and several sample the same images and compute the same DDPO update: a toy, a small U-Net, an adapter."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jrl.learners.ddpo import DDPOState, init_ddpo_state, make_ddpo_update
from jrl.learners.ddpo_config import DDPOConfig
from jrl.mesh import batch_sharding, make_mesh, replicated, tree_shardings
from jrl.models.adapters.config import LoraConfig
from jrl.models.diffusion.unet import UNet
from jrl.ops.metrics import finalize
from jrl.rollout.diffuse import make_diffuse
from jrl.typing import DDPOBatch, DenoiserFns, Trajectories
from tests.diffusion_toy import (
    SD_SCHEDULE,
    WIDTH,
    row_keys,
    toy_denoiser,
    toy_frozen,
    toy_negative,
    toy_params,
    toy_prompts,
)
from tests.learners.batches import copied, sgd
from tests.mesh.test_mesh_updates import REMATERIALIZED, difference, largest
from tests.models.diffusion.tiny_folder import random_weights, tiny_parts

pytestmark = pytest.mark.mesh

ROWS, STEPS, LATENT = 16, 3, (8, 8, 4)


class Model(NamedTuple):
    """A denoiser with its weights; prompts and images are the toy's."""

    functions: DenoiserFns
    params: Any
    frozen: Any


def toy() -> Model:
    return Model(toy_denoiser(), toy_params(3), toy_frozen())


def small_unet() -> Model:
    return whole(tiny_parts()["unet"])


def xl_unet() -> Model:
    """As the small one, in the way of Stable Diffusion XL: the last row of a prompt is its pooled vector."""
    config = replace(
        tiny_parts()["unet"].config,
        transformer_layers_per_block=(1, 2),
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=2,
        projection_class_embeddings_input_dim=18,
    )
    return whole(UNet(config))


def whole(unet: UNet) -> Model:
    """A U-Net all of which trains."""
    around = toy_denoiser()
    assert unet.config.cross_attention_dim == WIDTH
    weights = jax.tree.map(jnp.asarray, random_weights(unet))

    def predict(params: Any, frozen: Any, latents: Any, timesteps: Any, context: Any) -> jax.Array:
        del frozen
        return unet.apply(params, None, latents, timesteps, context, dtype=jnp.float32, remat=False)

    functions = DenoiserFns(
        encode=around.encode,
        predict=predict,
        reference=lambda frozen, *rest: predict(frozen["reference"], frozen, *rest),
        decode=around.decode,
    )
    changed = jax.tree.map(lambda x: 1.01 * x, weights)
    return Model(functions, changed, {"embedding": toy_frozen()["embedding"], "reference": weights})


def adapter() -> Model:
    """The small U-Net with an adapter that has moved; its base is the reference."""
    unet, around = tiny_parts()["unet"], toy_denoiser()
    base = jax.tree.map(jnp.asarray, random_weights(unet))
    lora = unet.bind_lora(LoraConfig(r=4, lora_alpha=4, init_lora_weights="gaussian"))
    rng = np.random.default_rng(0)

    def predict(params: Any, frozen: Any, latents: Any, timesteps: Any, context: Any) -> jax.Array:
        variables = None if params is None else lora.variables(params["lora"])
        return unet.apply(
            frozen["unet"], variables, latents, timesteps, context, dtype=jnp.float32, remat=False
        )

    moved = jax.tree.map(
        lambda x: x + jnp.asarray(rng.normal(size=x.shape) * 0.1, jnp.float32),
        lora.init(jax.random.key(0), base),
    )
    functions = DenoiserFns(
        encode=around.encode,
        predict=predict,
        reference=lambda frozen, *rest: predict(None, frozen, *rest),
        decode=around.decode,
    )
    return Model(functions, {"lora": moved}, {"embedding": toy_frozen()["embedding"], "unet": base})


def on(mesh: Mesh | None, call: Callable[..., Any], *arguments: Any) -> Any:
    """What a call returns, on the host, with the mesh in force."""
    if mesh is None:
        return jax.device_get(call(*arguments))
    with jax.set_mesh(mesh):
        return jax.device_get(call(*arguments))


def put(mesh: Mesh | None, tree: Any, where: Callable[[Mesh], Any]) -> Any:
    return tree if mesh is None else jax.device_put(tree, where(mesh))


def weights(mesh: Mesh | None, tree: Any) -> Any:
    return tree if mesh is None else jax.device_put(tree, tree_shardings(mesh, tree)[0])


def sample(model: Model, mesh: Mesh | None) -> tuple[Trajectories, Any]:
    """Trajectories and images of 16 rows."""
    program = jax.jit(
        make_diffuse(
            model.functions,
            SD_SCHEDULE,
            num_steps=STEPS,
            eta=1.0,
            guidance_scale=3.0,
            guidance_rescale=0.0,
            latent_shape=LATENT,
            decode_rows=1,
        )
    )
    rows = put(mesh, (toy_prompts(ROWS), *row_keys(ROWS)), batch_sharding)
    return on(
        mesh,
        program,
        weights(mesh, model.params),
        weights(mesh, model.frozen),
        rows[0],
        put(mesh, toy_negative(model.frozen), replicated),
        *rows[1:],
    )


@functools.cache
def alone(make: Callable[[], Model]) -> tuple[Trajectories, Any]:
    """What one device samples."""
    return sample(make(), None)


def update(
    make: Callable[[], Model], mesh: Mesh | None, *, minibatch_size: int = 8
) -> tuple[DDPOState, dict[str, float]]:
    """Two passes of two optimizer steps on what one device sampled; log-probabilities are computed anew."""
    model = make()
    config = DDPOConfig(
        sample_num_steps=STEPS,
        sample_guidance_scale=3.0,
        train_num_inner_epochs=2,
        train_clip_range=0.01,
        beta_kl=0.1,
        ema_decay=0.5,
        old_log_probs="recompute",
    )
    optimizer = sgd(1e-3)
    program = jax.jit(
        make_ddpo_update(
            model.functions, SD_SCHEDULE, optimizer, config, batch_size=8, minibatch_size=minibatch_size
        ),
        donate_argnums=0,
    )
    advantages = np.random.default_rng(0).normal(size=ROWS).astype(np.float32)
    trajectories, advantages = put(mesh, (alone(make)[0], advantages), batch_sharding)
    state, metrics = on(
        mesh,
        program,
        weights(mesh, init_ddpo_state(copied(model.params), optimizer, config)),
        weights(mesh, model.frozen),
        DDPOBatch(trajectories, put(mesh, toy_negative(model.frozen), replicated), advantages),
        put(mesh, jax.random.key(0), replicated),
    )
    return state, finalize(metrics)


@functools.cache
def expected(make: Callable[[], Model]) -> tuple[DDPOState, dict[str, float]]:
    """What one device computes."""
    return update(make, None)


def assert_alike(found: tuple[DDPOState, Any], wanted: tuple[DDPOState, Any], start: Any) -> None:
    moved = largest(difference, wanted[0].train.params, start)
    assert moved > 1e-5, "the update must do something"
    assert largest(difference, found[0].train.params, wanted[0].train.params) < 1e-6
    assert largest(difference, found[0].ema, wanted[0].ema) < 1e-6
    late = {"ddpo/pre_update_ratio_max_dev"}
    assert found[1].keys() == wanted[1].keys()
    for name in wanted[1].keys() - late:
        assert found[1][name] == pytest.approx(wanted[1][name], rel=1e-4, abs=1e-5), name
    assert found[1]["ddpo/pre_update_ratio_max_dev"] <= 5e-6


@pytest.mark.parametrize("make", [toy, small_unet, xl_unet])
def test_samples_agree(make: Callable[[], Model], mesh: Mesh, capfd: pytest.CaptureFixture[str]) -> None:
    wanted, wanted_images = alone(make)
    capfd.readouterr()
    found, images = sample(make(), mesh)
    assert REMATERIALIZED not in capfd.readouterr().err
    scale = np.abs(wanted.latents).max()
    np.testing.assert_allclose(found.latents, wanted.latents, rtol=0, atol=1e-5 * scale)
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=1e-4)
    np.testing.assert_allclose(images, wanted_images, atol=1e-4)


@pytest.mark.parametrize("make", [toy, small_unet, xl_unet, adapter])
def test_lore_5_2_a_whole_update_agrees(
    make: Callable[[], Model], mesh: Mesh, capfd: pytest.CaptureFixture[str]
) -> None:
    wanted = expected(make)
    capfd.readouterr()
    found = update(make, mesh)
    assert REMATERIALIZED not in capfd.readouterr().err
    assert_alike(found, wanted, make().params)


def test_two_devices_with_four_samples_each_are_one_with_eight() -> None:
    pair = make_mesh(2, 1, 1, devices=jax.devices()[:2])
    assert_alike(update(toy, pair), expected(toy), toy().params)
    # And as one device that takes them in two halves.
    assert_alike(update(toy, None, minibatch_size=4), expected(toy), toy().params)
