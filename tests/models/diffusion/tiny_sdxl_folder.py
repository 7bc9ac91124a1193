# SPDX-License-Identifier: Apache-2.0
"""A folder of a tiny Stable Diffusion XL, written by jrl without torch; nothing is compiled for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jrl.models.diffusion.clip_config import read_clip_config, read_clip_projected_config
from jrl.models.diffusion.clip_projection import ClipProjected
from jrl.models.diffusion.clip_text import ClipText
from jrl.models.diffusion.part_files import PART_FILES, Network
from jrl.models.diffusion.saving import FolderFiles, StoredPart, write_model_folder
from jrl.models.diffusion.tokenizer import load_clip_tokenizer
from jrl.models.diffusion.unet import UNet
from jrl.models.diffusion.unet_config import read_unet_config
from jrl.models.diffusion.vae import VAE
from jrl.models.diffusion.vae_config import read_vae_config
from tests.models.diffusion.tiny_folder import random_weights
from tests.models.diffusion.tiny_sd3_folder import PADS
from tests.models.diffusion.toy_tokenizer import save_toy_tokenizer

# Every level has its own number of heads and of transformer blocks, as the published model has.
UNET: dict[str, Any] = {
    "sample_size": 8,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "block_out_channels": [4, 8, 12],
    "layers_per_block": 1,
    "norm_num_groups": 2,
    "cross_attention_dim": 20,
    "transformer_layers_per_block": [1, 2, 3],
    "attention_head_dim": [1, 2, 3],
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 6,
    "projection_class_embeddings_input_dim": 42,
    "upcast_attention": False,
}
_CLIP: dict[str, Any] = {"vocab_size": 600, "num_attention_heads": 2}
# As published: the first encoder has no projection, and both configs say 2 where the id of the end is meant.
CLIPS: tuple[dict[str, Any], ...] = (
    _CLIP
    | {
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "projection_dim": 8,
        "eos_token_id": 2,
        "hidden_act": "quick_gelu",
    },
    _CLIP
    | {
        "hidden_size": 12,
        "intermediate_size": 16,
        "num_hidden_layers": 3,
        "projection_dim": 6,
        "eos_token_id": 2,
        "hidden_act": "gelu",
    },
)
VAE_CHANGES: dict[str, Any] = {"scaling_factor": 0.13025, "force_upcast": True}
SCHEDULER: dict[str, Any] = {
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "clip_sample": False,
    "interpolation_type": "linear",
    "num_train_timesteps": 1000,
    "prediction_type": "epsilon",
    "sample_max_value": 1.0,
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
    "steps_offset": 1,
    "timestep_spacing": "leading",
    "trained_betas": None,
    "use_karras_sigmas": False,
}
INDEX = {
    "_class_name": "StableDiffusionXLPipeline",
    "_diffusers_version": "0.35.0",
    "add_watermarker": None,
    "feature_extractor": [None, None],
    "force_zeros_for_empty_prompt": True,
    "image_encoder": [None, None],
    "scheduler": ["diffusers", "EulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "tokenizer_2": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
_VAE: dict[str, Any] = {
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "block_out_channels": [4, 8],
    "norm_num_groups": 2,
}


def save_sdxl_tokenizers(folder: Path, *, length: int = 77) -> dict[str, Path]:
    """Writes the folders of both tokenizers."""
    return {
        name: save_toy_tokenizer(folder / name, pad_token=pad, length=length)
        for name, pad in zip(("tokenizer", "tokenizer_2"), PADS, strict=True)
    }


def tiny_sdxl_parts(clip_length: int) -> dict[str, Network]:
    """All networks, by folder."""
    first, second = (clip | {"max_position_embeddings": clip_length} for clip in CLIPS)
    vae = VAE(read_vae_config(_VAE | VAE_CHANGES))
    return {
        "unet": UNet(read_unet_config(UNET), image_factor=vae.factor),
        "vae": vae,
        "text_encoder": ClipText(read_clip_config(first)),
        "text_encoder_2": ClipProjected(read_clip_projected_config(second)),
    }


def save_tiny_sdxl_folder(folder: Path, *, clip_length: int = 8) -> Path:
    """Writes the folder; prompts are short, so that it computes fast."""
    parts = tiny_sdxl_parts(clip_length)
    tokens = save_sdxl_tokenizers(folder.with_name(f"{folder.name}-tokenizers"), length=clip_length)
    files = FolderFiles(
        INDEX,
        {
            name: StoredPart(part.stored_config(), part.entries(), PART_FILES[name].stem, (name,))
            for name, part in parts.items()
        },
        {"_class_name": "EulerDiscreteScheduler", **SCHEDULER},
        {
            name: load_clip_tokenizer(path, max_length=clip_length, vocab_size=600)
            for name, path in tokens.items()
        },
    )
    write_model_folder(folder, files, {name: random_weights(part) for name, part in parts.items()}, None)
    return folder
