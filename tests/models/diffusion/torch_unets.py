# SPDX-License-Identifier: Apache-2.0
"""Tiny U-Nets of torch, with every norm and bias perturbed, and the same weights as parameters of jrl."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from diffusers import UNet2DConditionModel
from flax import traverse_util

from jrl.models.diffusion.unet import UNet
from jrl.models.diffusion.unet_config import read_unet_config
from jrl.models.families.base import Entry
from tests.models.diffusion.tiny_pipelines import UNETS, perturb

KINDS = {
    **UNETS,
    "C": {
        "block_out_channels": (4, 8),
        "layers_per_block": 1,
        "sample_size": 16,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "cross_attention_dim": 8,
        "attention_head_dim": 2,
        "norm_num_groups": 4,
    },
}


def torch_unet(kind: str, **changes: Any) -> UNet2DConditionModel:
    """A tiny network of torch with random weights."""
    torch.manual_seed(0)
    return perturb(UNet2DConditionModel(**KINDS[kind] | changes), 1)


def same_unet(module: UNet2DConditionModel) -> tuple[UNet, dict[str, Any]]:
    """The same network and weights here."""
    unet = UNet(read_unet_config(dict(module.config)))
    shapes = traverse_util.flatten_dict(unet.shapes, sep="/")
    return unet, loaded(unet.entries(), module.state_dict(), {path: x.shape for path, x in shapes.items()})


def loaded(
    entries: Sequence[Entry], state: dict[str, torch.Tensor], shapes: dict[str, Any]
) -> dict[str, Any]:
    """Tensors of torch as a tree; every tensor has its place, and every place its tensor."""
    assert {entry.name for entry in entries} == set(state)
    assert {path for entry in entries for path in entry.paths} == set(shapes)
    flat = {}
    for entry in entries:
        (path,) = entry.paths
        assert entry.shape == tuple(state[entry.name].shape), entry.name
        (array,) = entry.transform.load(state[entry.name].detach().numpy(), [shapes[path]])
        flat[path] = jnp.array(array, jnp.float32, copy=True)
        assert flat[path].shape == shapes[path], path
    return dict(traverse_util.unflatten_dict(flat, sep="/"))


def nchw(x: Any) -> torch.Tensor:
    """Channels first, for torch."""
    return torch.from_numpy(np.array(x)).permute(0, 3, 1, 2).contiguous()


def nhwc(x: torch.Tensor) -> np.ndarray:
    """Channels last."""
    return x.detach().permute(0, 2, 3, 1).numpy()


def inputs(width: int, context_width: int, *, height: int = 8, seed: int = 0) -> tuple[Any, Any, Any]:
    """Latents with a mean that is large beside their deviation's square, timesteps, context: three rows."""
    random = np.random.default_rng(seed)
    latents = (5.0 * random.standard_normal((3, height, height, width)) + 3.0).astype(np.float32)
    context = random.standard_normal((3, 5, context_width)).astype(np.float32)
    return latents, np.array([1, 501, 981], np.int32), context
