# SPDX-License-Identifier: Apache-2.0
"""The transformer of FLUX.1 against diffusers' of torch: outputs, gradients, and files."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from safetensors.numpy import load_file

pytest.importorskip("torch")
pytest.importorskip("diffusers")
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from peft.utils import get_peft_model_state_dict

from jrl.models.adapters.config import LoraConfig
from jrl.models.diffusion.flux import Flux, pack, patch_rotation, unpack
from jrl.models.diffusion.flux_config import read_flux_config, stored_flux_config
from jrl.models.diffusion.joined_context import join_context
from jrl.models.diffusion.lora_files import read_lora
from jrl.models.diffusion.part_files import PartFiles, read_part
from jrl.models.diffusion.saving import DIFFUSERS_STEM, write_lora_folder, write_unet_folder
from tests.models.diffusion.test_flux import FLUX_DEV, FLUX_SCHNELL
from tests.models.diffusion.tiny_flux import tiny_transformer
from tests.models.diffusion.tiny_flux_folder import TRANSFORMER
from tests.models.diffusion.torch_unets import loaded, nchw, nhwc

pytestmark = pytest.mark.parity
F32 = jnp.float32
TOKENS, GUIDANCE = 5, 3.5
CASES: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "dev": ({}, (8, 8)),
    "schnell": ({"guidance_embeds": False}, (4, 10)),
    "one block of each kind": ({"num_layers": 1, "num_single_layers": 1, "out_channels": 64}, (6, 2)),
    "other axes and widths": (
        {"axes_dims_rope": (8, 2, 2), "in_channels": 12, "num_attention_heads": 3, "num_single_layers": 3},
        (8, 12),
    ),
}


def both(case: str) -> tuple[FluxTransformer2DModel, Flux, dict[str, Any]]:
    theirs = tiny_transformer(**CASES[case][0])
    ours = Flux(read_flux_config(dict(theirs.config)))
    if ours.config.guidance_embeds:
        ours = ours.at_guidance(GUIDANCE)
    shapes = traverse_util.flatten_dict(ours.shapes, sep="/")
    return theirs, ours, loaded(ours.entries(), theirs.state_dict(), {k: x.shape for k, x in shapes.items()})


def inputs(theirs: FluxTransformer2DModel, size: tuple[int, int]) -> tuple[Any, ...]:
    random, config = np.random.default_rng(0), theirs.config
    latents, tokens, pooled = (
        random.standard_normal(shape).astype(np.float32)
        for shape in (
            (3, *size, config.in_channels // 4),
            (3, TOKENS, config.joint_attention_dim),
            (3, config.pooled_projection_dim),
        )
    )
    return latents, np.array([1000.0, 500.5, 2.994], np.float32), tokens, pooled


def call(theirs: Any, latents: Any, times: Any, tokens: Any, pooled: Any) -> torch.Tensor:
    """As the pipeline calls it: packed, with ids, and timesteps in [0, 1]."""
    rows, height, width, channels = latents.shape
    packed = FluxPipeline._pack_latents(nchw(latents), rows, channels, height, width)
    ids = FluxPipeline._prepare_latent_image_ids(rows, height // 2, width // 2, "cpu", torch.float32)
    found = theirs(
        hidden_states=packed,
        encoder_hidden_states=torch.from_numpy(tokens),
        pooled_projections=torch.from_numpy(pooled),
        timestep=torch.from_numpy(times) / 1000,
        img_ids=ids,
        txt_ids=torch.zeros(tokens.shape[1], 3),
        guidance=torch.full((rows,), GUIDANCE) if theirs.config.guidance_embeds else None,
    ).sample
    return FluxPipeline._unpack_latents(found, 8 * height, 8 * width, 8)


@pytest.mark.parametrize("case", CASES)
def test_output(case: str) -> None:
    theirs, ours, params = both(case)
    latents, times, tokens, pooled = inputs(theirs, CASES[case][1])
    with torch.no_grad():
        wanted = nhwc(call(theirs, latents, times, tokens, pooled))
    context = join_context(jnp.asarray(tokens), jnp.asarray(pooled))
    found = jax.jit(lambda params, *data: ours.apply(params, None, *data, dtype=F32, remat=False))(
        params, latents, times, context
    )
    assert wanted.std() > 0.1
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_packing() -> None:
    latents = np.random.default_rng(0).standard_normal((2, 6, 8, 3)).astype(np.float32)
    wanted = FluxPipeline._pack_latents(nchw(latents), 2, 3, 6, 8)
    found = pack(jnp.asarray(latents))
    np.testing.assert_array_equal(found, wanted.numpy())
    np.testing.assert_array_equal(unpack(found, 6, 8), latents)


def test_rotary_positions() -> None:
    theirs = tiny_transformer()
    ids = FluxPipeline._prepare_latent_image_ids(1, 3, 5, "cpu", torch.float32)
    cos, sin = theirs.pos_embed(torch.cat([ids, torch.zeros(4, 3)]))
    found = patch_rotation(read_flux_config(dict(theirs.config)), 3, 5, 4)
    np.testing.assert_allclose(np.repeat(found.cos[0], 2, axis=-1), cos, atol=1e-7)
    np.testing.assert_allclose(np.repeat(found.sin[0], 2, axis=-1), sin, atol=1e-7)


def test_gradient_of_all_parameters() -> None:
    theirs, ours, params = both("dev")
    latents, times, tokens, pooled = inputs(theirs, (4, 6))
    weights = np.random.default_rng(1).standard_normal(latents.shape).astype(np.float32)
    (call(theirs, latents, times, tokens, pooled) * nchw(weights)).sum().backward()
    state = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    shapes = traverse_util.flatten_dict(ours.shapes, sep="/")
    wanted = loaded(ours.entries(), state, {path: x.shape for path, x in shapes.items()})
    context = join_context(jnp.asarray(tokens), jnp.asarray(pooled))

    def objective(params: Any) -> Any:
        data = (jnp.asarray(latents), jnp.asarray(times), context)
        return (ours.apply(params, None, *data, dtype=F32, remat=True) * weights).sum()

    got = jax.jit(jax.grad(objective))(params)
    whole = norm(wanted)
    for (path, one), other in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True
    ):
        assert norm(one - other) <= 1e-4 * max(norm(other), 1e-3 * whole), path


def norm(tree: Any) -> float:
    return float(np.sqrt(sum(np.square(np.asarray(x, np.float64)).sum() for x in jax.tree.leaves(tree))))


def test_a_folder_is_read_and_written_bit_for_bit(tmp_path: Path) -> None:
    theirs, ours, params = both("dev")
    theirs.save_pretrained(tmp_path / "transformer")
    read = read_part(tmp_path / "transformer", ours, PartFiles(DIFFUSERS_STEM), None)
    jax.tree.map(np.testing.assert_array_equal, read, jax.device_get(params))
    write_unet_folder(tmp_path / "out", ours.stored_config(), ours.entries(), read, name="transformer")
    name = "transformer/diffusion_pytorch_model.safetensors"
    before, after = load_file(tmp_path / name), load_file(tmp_path / "out" / name)
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        np.testing.assert_array_equal(after[key].view(np.uint8), tensor.view(np.uint8), err_msg=key)
    again = FluxTransformer2DModel.from_pretrained(tmp_path / "out" / "transformer")
    for key, value in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key


@pytest.mark.parametrize(
    "targets", [None, ["attn.to_q", "proj_mlp", "proj_out", "ff.net.2"]], ids=["default", "single blocks"]
)
def test_adapters_both_ways(targets: list[str] | None, tmp_path: Path) -> None:
    theirs, ours, params = both("dev")
    lora = ours.bind_lora(LoraConfig(r=2, lora_alpha=4, target_modules=targets))
    adapters = lora.init(jax.random.key(0), params)
    # Of guidance 3.5 the sinusoids of 3500 differ by 2e-4: larger adapters would multiply that.
    adapters = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape) / 10, adapters)
    write_lora_folder(tmp_path, lora, adapters, part="transformer")
    tensors = load_file(tmp_path / "pytorch_lora_weights.safetensors")
    theirs.load_lora_adapter(
        {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}, prefix="transformer"
    )
    latents, times, tokens, pooled = inputs(theirs, (6, 6))
    with torch.no_grad():
        wanted = nhwc(call(theirs, latents, times, tokens, pooled))
    # What diffusers writes of it is read, too.
    layers = get_peft_model_state_dict(theirs, adapter_name="default_0")
    FluxPipeline.save_lora_weights(tmp_path / "theirs", transformer_lora_layers=layers)
    context = join_context(jnp.asarray(tokens), jnp.asarray(pooled))
    again, back = read_lora(tmp_path, ours), read_lora(tmp_path / "theirs", ours)
    base = jax.jit(lambda *data: ours.apply(params, None, *data, dtype=F32, remat=False))
    for bound, matrices in (
        (lora, adapters),
        (again.lora, again.adapters),
        (back.lora, back.adapters),
    ):
        variables = bound.variables(matrices)
        apply = jax.jit(lambda *data: ours.apply(*data, dtype=F32, remat=False))
        found = apply(params, variables, latents, times, context)
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)
    assert np.abs(base(latents, times, context) - wanted).max() > 0.05


def test_every_key_of_its_class_is_known() -> None:
    """A field, or a key with the one value that is implemented: what is neither is refused."""
    known = set(inspect.signature(FluxTransformer2DModel.__init__).parameters) - {"self"}
    stored = stored_flux_config(read_flux_config({}))
    assert known == set(stored) - {"_class_name"}
    theirs = dict(FluxTransformer2DModel(**TRANSFORMER).config)
    assert read_flux_config(theirs) == read_flux_config(TRANSFORMER)


@pytest.mark.parametrize("config", [FLUX_DEV, FLUX_SCHNELL], ids=["dev", "schnell"])
def test_tensors_at_real_size(config: dict[str, Any]) -> None:
    with torch.device("meta"):
        theirs = FluxTransformer2DModel(**{k: v for k, v in config.items() if not k.startswith("_")})
    wanted = {name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items()}
    assert {entry.name: entry.shape for entry in Flux(read_flux_config(config)).entries()} == wanted
