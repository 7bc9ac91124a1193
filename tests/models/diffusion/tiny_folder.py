# SPDX-License-Identifier: Apache-2.0
"""A whole diffusers folder of a few thousand weights, written by jrl without torch; nothing is compiled for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jrl.models.diffusion.clip_config import ClipTextConfig
from jrl.models.diffusion.clip_text import ClipText
from jrl.models.diffusion.part_files import PART_FILES, Network
from jrl.models.diffusion.saving import FolderFiles, StoredPart, write_model_folder
from jrl.models.diffusion.tokenizer import load_clip_tokenizer
from jrl.models.diffusion.unet import UNet
from jrl.models.diffusion.unet_config import UNetConfig
from jrl.models.diffusion.vae import VAE
from jrl.models.diffusion.vae_config import VAEConfig
from tests.models.diffusion.toy_tokenizer import save_toy_tokenizer

INDEX = {
    "_class_name": "StableDiffusionPipeline",
    "_diffusers_version": "0.30.0",
    "scheduler": ["diffusers", "PNDMScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
SCHEDULER = {
    "_class_name": "PNDMScheduler",
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "clip_sample": False,
    "num_train_timesteps": 1000,
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
    "steps_offset": 1,
}


def tiny_parts() -> dict[str, Any]:
    """The three networks, of the shape of pipeline A."""
    return {
        "unet": UNet(
            UNetConfig(
                sample_size=8,
                block_out_channels=(4, 8),
                layers_per_block=1,
                down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
                up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
                cross_attention_dim=8,
                attention_head_dim=8,
                norm_num_groups=2,
            )
        ),
        "vae": VAE(
            VAEConfig(
                down_block_types=("DownEncoderBlock2D",) * 2,
                up_block_types=("UpDecoderBlock2D",) * 2,
                block_out_channels=(4, 8),
                norm_num_groups=2,
            )
        ),
        "text_encoder": ClipText(
            ClipTextConfig(
                vocab_size=600,
                hidden_size=8,
                intermediate_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                max_position_embeddings=16,
            )
        ),
    }


def random_weights(part: Network, seed: int = 0) -> Any:
    """Small normal numbers for every parameter, around 1 for scales of norms."""
    generator = np.random.default_rng(seed)

    def make(path: Any, leaf: Any) -> np.ndarray:
        noise = 0.2 * generator.standard_normal(leaf.shape)
        return np.asarray(noise + (path[-1].key == "scale"), np.float32)

    return jax.tree_util.tree_map_with_path(make, jax.eval_shape(part.init, jax.random.key(0)))


def save_tiny_folder(folder: Path) -> Path:
    """Writes the folder."""
    parts = tiny_parts()
    tokens = save_toy_tokenizer(folder.with_name(f"{folder.name}-tokenizer"), length=16)
    files = FolderFiles(
        INDEX,
        {
            name: StoredPart(part.stored_config(), part.entries(), PART_FILES[name].stem, (name,))
            for name, part in parts.items()
        },
        SCHEDULER,
        {"tokenizer": load_clip_tokenizer(tokens, max_length=16, vocab_size=600)},
    )
    write_model_folder(folder, files, {name: random_weights(part) for name, part in parts.items()}, None)
    return folder


def change_json(path: Path, **changes: Any) -> None:
    """Replaces entries of a JSON file; None takes one away."""
    values = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
