# SPDX-License-Identifier: Apache-2.0
"""Stable Diffusion's autoencoder and text encoders at their true size, by shapes alone."""

from __future__ import annotations

import math
from typing import Any

import jax
import pytest

from jrl.models.diffusion.clip_config import read_clip_config
from jrl.models.diffusion.clip_text import ClipText
from jrl.models.diffusion.vae import VAE
from jrl.models.diffusion.vae_config import read_vae_config
from jrl.models.entries_io import flat_tree

# As they stand in the repositories of Stable Diffusion 1.5 and 2.1.
SD_VAE = {
    "_class_name": "AutoencoderKL",
    "_diffusers_version": "0.6.0",
    "act_fn": "silu",
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "in_channels": 3,
    "latent_channels": 4,
    "layers_per_block": 2,
    "norm_num_groups": 32,
    "out_channels": 3,
    "sample_size": 512,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
}
SD_1_CLIP = {
    "_name_or_path": "openai/clip-vit-large-patch14",
    "architectures": ["CLIPTextModel"],
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "dropout": 0.0,
    "eos_token_id": 2,
    "hidden_act": "quick_gelu",
    "hidden_size": 768,
    "initializer_factor": 1.0,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 77,
    "model_type": "clip_text_model",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 1,
    "projection_dim": 768,
    "torch_dtype": "float32",
    "transformers_version": "4.22.0.dev0",
    "vocab_size": 49408,
}
# The last but one of 24 layers is what Stable Diffusion 2 reads: its folder holds 23.
SD_2_CLIP = SD_1_CLIP | {
    "hidden_act": "gelu",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 23,
    "projection_dim": 512,
}
SD = VAE(read_vae_config(SD_VAE))


@pytest.mark.parametrize(
    ("part", "num_parameters", "num_tensors"),
    [
        (SD, 83_653_863, 248),
        (ClipText(read_clip_config(SD_1_CLIP)), 123_060_480, 196),
        (ClipText(read_clip_config(SD_2_CLIP)), 340_387_840, 372),
    ],
    ids=["vae", "clip-l", "clip-h"],
)
def test_sizes(part: Any, num_parameters: int, num_tensors: int) -> None:
    shapes = flat_tree(jax.eval_shape(part.init, jax.random.key(0)))
    assert sum(math.prod(leaf.shape) for leaf in shapes.values()) == num_parameters
    entries = part.entries()
    assert len(entries) == num_tensors
    assert sum(math.prod(entry.shape) for entry in entries) == num_parameters
    assert {path for entry in entries for path in entry.paths} == set(shapes)


def test_halves_of_the_autoencoder() -> None:
    sizes = {"encoder": 0, "decoder": 0}
    for entry in SD.entries():
        half = "encoder" if entry.name.startswith(("encoder.", "quant_conv.")) else "decoder"
        sizes[half] += math.prod(entry.shape)
    assert sizes == {"encoder": 34_163_664, "decoder": 49_490_199}
    assert (SD.factor, SD.channels, SD.config.scaling_factor) == (8, 4, 0.18215)
