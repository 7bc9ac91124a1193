# SPDX-License-Identifier: Apache-2.0
"""The multimodal diffusion transformer against diffusers' of torch: outputs, gradients, and files."""

from __future__ import annotations

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
from diffusers import SD3Transformer2DModel

from jrl.models.adapters.config import LoraConfig
from jrl.models.diffusion.joined_context import join_context
from jrl.models.diffusion.lora_files import read_lora
from jrl.models.diffusion.mmdit import MMDiT, positions
from jrl.models.diffusion.mmdit_config import read_mmdit_config
from jrl.models.diffusion.part_files import PartFiles, read_part
from jrl.models.diffusion.saving import DIFFUSERS_STEM, write_lora_folder, write_unet_folder
from tests.models.diffusion.test_mmdit import SD_3, SD_35_LARGE, SD_35_MEDIUM
from tests.models.diffusion.tiny_pipelines import perturb
from tests.models.diffusion.torch_unets import loaded, nchw, nhwc

pytestmark = pytest.mark.parity
F32 = jnp.float32
TINY: dict[str, Any] = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "num_layers": 3,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "joint_attention_dim": 12,
    "caption_projection_dim": 16,
    "pooled_projection_dim": 10,
    "out_channels": 4,
    "pos_embed_max_size": 6,
}
CASES: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "3 medium": ({}, (8, 8)),
    "3.5 large": ({"qk_norm": "rms_norm"}, (8, 4)),
    "3.5 medium": ({"qk_norm": "rms_norm", "dual_attention_layers": (0, 1)}, (6, 10)),
    "dual to the end": ({"dual_attention_layers": (2,), "out_channels": 6}, (12, 12)),
    "one layer of one latent": ({"num_layers": 1, "patch_size": 1, "out_channels": None}, (3, 5)),
}


def both(case: str) -> tuple[SD3Transformer2DModel, MMDiT, dict[str, Any]]:
    torch.manual_seed(0)
    theirs = SD3Transformer2DModel(**TINY | CASES[case][0])
    with torch.no_grad():
        theirs.pos_embed.pos_embed += 0.3 * torch.randn(theirs.pos_embed.pos_embed.shape)
        for name, parameter in theirs.named_parameters():
            if ".norm_" in name:  # of queries and keys: an RMSNorm of diffusers' own
                parameter += 0.3 * torch.randn(parameter.shape)
    perturb(theirs, 1)
    ours = MMDiT(read_mmdit_config(dict(theirs.config)))
    shapes = traverse_util.flatten_dict(ours.shapes, sep="/")
    return theirs, ours, loaded(ours.entries(), theirs.state_dict(), {k: x.shape for k, x in shapes.items()})


def inputs(theirs: SD3Transformer2DModel, size: tuple[int, int]) -> tuple[Any, ...]:
    random, config = np.random.default_rng(0), theirs.config
    latents, tokens, pooled = (
        random.standard_normal(shape).astype(np.float32)
        for shape in (
            (3, *size, config.in_channels),
            (3, 5, config.joint_attention_dim),
            (3, config.pooled_projection_dim),
        )
    )
    return latents, np.array([1000.0, 500.5, 2.994], np.float32), tokens, pooled


def call(theirs: Any, latents: Any, times: Any, tokens: Any, pooled: Any) -> torch.Tensor:
    tensors = (torch.from_numpy(x) for x in (tokens, pooled, times))
    return theirs(nchw(latents), *tensors).sample


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


def test_gradient_of_all_parameters() -> None:
    theirs, ours, params = both("3.5 medium")
    latents, times, tokens, pooled = inputs(theirs, (8, 8))
    weights = np.random.default_rng(1).standard_normal(latents.shape).astype(np.float32)
    (call(theirs, latents, times, tokens, pooled) * nchw(weights)).sum().backward()
    state = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    state["pos_embed.pos_embed"] = torch.zeros_like(theirs.pos_embed.pos_embed)
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


def test_fresh_positions_are_diffusers_own() -> None:
    for changes in ({}, {"sample_size": 12, "pos_embed_max_size": 5}):
        theirs = SD3Transformer2DModel(**TINY | changes)
        found = positions(read_mmdit_config(dict(theirs.config)))
        np.testing.assert_allclose(found, theirs.pos_embed.pos_embed, atol=1e-5)


def test_a_folder_is_read_and_written_bit_for_bit(tmp_path: Path) -> None:
    theirs, ours, params = both("3.5 medium")
    theirs.save_pretrained(tmp_path / "transformer")
    read = read_part(tmp_path / "transformer", ours, PartFiles(DIFFUSERS_STEM), None)
    jax.tree.map(np.testing.assert_array_equal, read, jax.device_get(params))
    write_unet_folder(tmp_path / "out", ours.stored_config(), ours.entries(), read, name="transformer")
    name = "transformer/diffusion_pytorch_model.safetensors"
    before, after = load_file(tmp_path / name), load_file(tmp_path / "out" / name)
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        np.testing.assert_array_equal(after[key].view(np.uint8), tensor.view(np.uint8), err_msg=key)
    again = SD3Transformer2DModel.from_pretrained(tmp_path / "out" / "transformer")
    for key, value in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key


def test_diffusers_reads_the_adapter(tmp_path: Path) -> None:
    theirs, ours, params = both("3.5 medium")
    lora = ours.bind_lora(LoraConfig(r=2, lora_alpha=4))
    adapters = lora.init(jax.random.key(0), params)
    adapters = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape) / 3, adapters)
    write_lora_folder(tmp_path, lora, adapters, part="transformer")
    theirs.load_lora_adapter(load_file_of_torch(tmp_path), prefix="transformer")
    latents, times, tokens, pooled = inputs(theirs, (6, 6))
    with torch.no_grad():
        wanted = nhwc(call(theirs, latents, times, tokens, pooled))
    context = join_context(jnp.asarray(tokens), jnp.asarray(pooled))
    again = read_lora(tmp_path, ours)
    for bound, matrices in ((lora, adapters), (again.lora, again.adapters)):
        variables = bound.variables(matrices)
        apply = jax.jit(lambda *data: ours.apply(*data, dtype=F32, remat=False))
        found = apply(params, variables, latents, times, context)
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)


def load_file_of_torch(folder: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / "pytorch_lora_weights.safetensors")
    return {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    "config", [SD_3, SD_35_MEDIUM, SD_35_LARGE], ids=["3 medium", "3.5 medium", "3.5 large"]
)
def test_tensors_at_real_size(config: dict[str, Any]) -> None:
    with torch.device("meta"):
        theirs = SD3Transformer2DModel(**{k: v for k, v in config.items() if not k.startswith("_")})
    wanted = {name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items()}
    assert {entry.name: entry.shape for entry in MMDiT(read_mmdit_config(config)).entries()} == wanted
