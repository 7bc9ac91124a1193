# SPDX-License-Identifier: Apache-2.0
"""The U-Net against diffusers' of torch: outputs, gradients, single blocks, and a written folder."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

pytest.importorskip("torch")
pytest.importorskip("diffusers")
import torch
from diffusers import UNet2DConditionModel
from peft import LoraConfig as PeftLoraConfig

from jrl.models.adapters.config import LoraConfig
from jrl.models.diffusion.layers import TimestepEmbedding, sinusoids
from jrl.models.diffusion.resnet import Downsample, ResnetBlock, Upsample
from jrl.models.diffusion.saving import write_unet_folder
from jrl.models.diffusion.transformer import SpatialTransformer
from jrl.models.diffusion.unet import LORA_TARGETS
from tests.models.diffusion.torch_unets import inputs, loaded, nchw, nhwc, same_unet, torch_unet

pytestmark = pytest.mark.parity
F32 = jnp.float32
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "A": ("A", {}, 8),
    "B": ("B", {}, 8),
    "C, sizes that halve unevenly": ("C", {}, 7),
    "C, linear, upcast, centred": (
        "C",
        {
            "use_linear_projection": True,
            "upcast_attention": True,
            "center_input_sample": True,
            "flip_sin_to_cos": False,
            "freq_shift": 1,
            "mid_block_scale_factor": 1.5,
            "norm_eps": 1e-2,
            "transformer_layers_per_block": 2,
        },
        8,
    ),
}


def close(got: Any, wanted: Any, tolerance: float) -> None:
    np.testing.assert_allclose(np.asarray(got), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_output(name: str) -> None:
    kind, changes, height = CASES[name]
    theirs = torch_unet(kind, **changes)
    ours, params = same_unet(theirs)
    latents, timesteps, context = inputs(4, theirs.config.cross_attention_dim, height=height)
    apply = jax.jit(lambda params, *data: ours.apply(params, None, *data, dtype=F32, remat=False))
    for times in (timesteps, np.array(601, np.int32)) if name == "A" else (timesteps,):
        with torch.no_grad():
            wanted = theirs(nchw(latents), torch.from_numpy(times), torch.from_numpy(context)).sample
        assert nhwc(wanted).std() > 0.1
        # One time for all rows is the same program here; that it is taken as it is, its shape tells.
        close(apply(params, latents, np.broadcast_to(times, (3,)), context), nhwc(wanted), 1e-5)
    assert jax.eval_shape(apply, params, latents, times, context).shape == latents.shape


def test_gradient_of_all_parameters() -> None:
    theirs = torch_unet("A")
    ours, params = same_unet(theirs)
    latents, timesteps, context = inputs(4, 8)
    weights = np.random.default_rng(1).standard_normal(latents.shape).astype(np.float32)
    output = theirs(nchw(latents), torch.from_numpy(timesteps), torch.from_numpy(context)).sample
    (output * nchw(weights)).sum().backward()
    state = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    shapes = {path: x.shape for path, x in traverse_util.flatten_dict(ours.shapes, sep="/").items()}
    wanted = loaded(ours.entries(), state, shapes)

    def objective(params: Any) -> Any:
        data = (jnp.asarray(latents), jnp.asarray(timesteps), jnp.asarray(context))
        return (ours.apply(params, None, *data, dtype=F32, remat=True) * weights).sum()

    got, whole = jax.jit(jax.grad(objective))(params), norm(wanted)
    assert norm(jax.tree.map(jnp.subtract, got, wanted)) <= 1e-4 * whole
    for (path, one), other in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True
    ):
        # Leaves whose true gradient is 0 are rounding alone.
        assert norm(one - other) <= 1e-4 * max(norm(other), 1e-3 * whole), path


def test_gradient_of_the_adapter() -> None:
    theirs = torch_unet("A")
    ours, params = same_unet(theirs)
    theirs.requires_grad_(False)
    theirs.add_adapter(PeftLoraConfig(r=4, lora_alpha=8, target_modules=list(LORA_TARGETS)))
    lora = ours.bind_lora(LoraConfig(r=4, lora_alpha=8))
    adapters = lora.init(jax.random.key(0), params)
    adapters = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape) / 3, adapters)
    trained = {name: p for name, p in theirs.named_parameters() if p.requires_grad}
    names = {
        f"{module}.lora_{leaf}.default.weight": adapters[module][leaf] for module in adapters for leaf in "AB"
    }
    assert set(names) == set(trained)
    with torch.no_grad():
        for name, value in names.items():
            trained[name].copy_(torch.from_numpy(np.array(value)))
    latents, timesteps, context = inputs(4, 8)
    weights = np.random.default_rng(1).standard_normal(latents.shape).astype(np.float32)
    output = theirs(nchw(latents), torch.from_numpy(timesteps), torch.from_numpy(context)).sample
    (output * nchw(weights)).sum().backward()

    def objective(adapters: Any) -> Any:
        data = (jnp.asarray(latents), jnp.asarray(timesteps), jnp.asarray(context))
        made = ours.apply(params, lora.variables(adapters), *data, dtype=F32, remat=False)
        return (made * weights).sum(), made

    got, made = jax.jit(jax.grad(objective, has_aux=True))(adapters)
    close(made, nhwc(output), 1e-5)
    for module, leaves in got.items():
        for leaf, gradient in leaves.items():
            wanted = trained[f"{module}.lora_{leaf}.default.weight"].grad.numpy()
            assert norm(gradient - wanted) <= 1e-4 * norm(wanted), (module, leaf)


def norm(tree: Any) -> float:
    return float(np.sqrt(sum(np.square(np.asarray(x, np.float64)).sum() for x in jax.tree.leaves(tree))))


def test_blocks_alone() -> None:
    """Each kind of block inside U-Net C, whose groups hold one or two channels."""
    theirs = torch_unet("C")
    _, params = same_unet(theirs)
    groups, epsilon = 4, theirs.config.norm_eps
    latents, timesteps, context = inputs(4, 8)
    random = np.random.default_rng(2)
    time = random.standard_normal((3, 16)).astype(np.float32)
    down, up = params["down_blocks_0"], params["up_blocks_0"]
    x, t, c = nchw(latents), torch.from_numpy(time), torch.from_numpy(context)

    def check(apply: Any, weights: Any, wanted: torch.Tensor, *data: Any) -> None:
        got = jax.jit(apply)({"params": weights}, *data)
        close(got, nhwc(wanted) if wanted.ndim == 4 else wanted.detach().numpy(), 2e-6)

    block = ResnetBlock(4, groups, epsilon, F32).apply
    transformer = SpatialTransformer(1, 2, groups, False, F32).apply
    # Of the small ones, the variance is as small as the epsilon of a norm.
    for small in (1.0, 1e-3):
        y = latents * np.float32(small)
        check(block, down["resnets_0"], theirs.down_blocks[0].resnets[0](nchw(y), t), y, time)
        (wanted,) = theirs.down_blocks[0].attentions[0](nchw(y), encoder_hidden_states=c, return_dict=False)
        check(transformer, down["attentions_0"], wanted, y, context)
    wide = np.concatenate([latents, latents[::-1], latents * 2.0], axis=-1)
    wanted = theirs.up_blocks[1].resnets[0](nchw(wide), t)
    check(block, params["up_blocks_1"]["resnets_0"], wanted, wide, time)
    check(Downsample(F32).apply, down["downsamplers_0"], theirs.down_blocks[0].downsamplers[0](x), latents)
    eight = np.concatenate([latents, latents[::-1]], axis=-1)
    wanted = theirs.up_blocks[0].upsamplers[0](nchw(eight), output_size=(15, 16))
    enlarged = functools.partial(Upsample(F32).apply, size=(15, 16))
    check(enlarged, up["upsamplers_0"], wanted, eight)
    waves = theirs.time_proj(torch.from_numpy(timesteps))
    check(
        TimestepEmbedding(16, F32).apply,
        params["time_embedding"],
        theirs.time_embedding(waves),
        waves.numpy(),
    )


@pytest.mark.parametrize(("flip", "shift", "width"), [(True, 0, 320), (False, 1, 32)])
def test_sinusoids(flip: bool, shift: int, width: int) -> None:
    from diffusers.models.embeddings import get_timestep_embedding

    times = np.array([0, 1, 21, 501, 999], np.int32)
    wanted = get_timestep_embedding(
        torch.from_numpy(times), width, flip_sin_to_cos=flip, downscale_freq_shift=shift
    )
    got = sinusoids(jnp.asarray(times), width, cosine_first=flip, freq_shift=shift)
    # An angle is at most t, and both round it to float32: beyond t = 80, one of its last bits is more than 1e-5.
    allowed = np.maximum(1e-6, times.astype(np.float64) * 2.0**-23)[:, None]
    assert (np.abs(np.asarray(got) - wanted.numpy()) <= allowed).all()


def test_diffusers_opens_what_is_written(tmp_path: Path) -> None:
    theirs = torch_unet("B")
    ours, params = same_unet(theirs)
    write_unet_folder(tmp_path / "saved", ours.stored_config(), ours.entries(), params)
    opened = UNet2DConditionModel.from_pretrained(tmp_path / "saved", subfolder="unet").eval()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(opened.state_dict()[name], tensor), name
    plain = {key: value for key, value in theirs.config.items() if not key.startswith("_")}
    assert json.loads(json.dumps({key: opened.config[key] for key in plain})) == json.loads(json.dumps(plain))
    latents, timesteps, context = inputs(4, 32)
    data = (nchw(latents), torch.from_numpy(timesteps), torch.from_numpy(context))
    with torch.no_grad():
        assert torch.equal(opened(*data).sample, theirs(*data).sample)
