# SPDX-License-Identifier: Apache-2.0
"""A folder of a tiny FLUX.1, written by jrl without torch; nothing is compiled for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jrl.models.diffusion.clip_config import read_clip_pooled_config
from jrl.models.diffusion.clip_text import ClipText
from jrl.models.diffusion.flux import Flux
from jrl.models.diffusion.flux_config import read_flux_config
from jrl.models.diffusion.part_files import Network, files_of
from jrl.models.diffusion.saving import FolderFiles, StoredPart, write_model_folder
from jrl.models.diffusion.t5_config import read_t5_config
from jrl.models.diffusion.t5_encoder import T5Encoder
from jrl.models.diffusion.tokenizer import load_clip_tokenizer, load_t5_tokenizer
from jrl.models.diffusion.vae import VAE
from jrl.models.diffusion.vae_config import read_vae_config
from tests.models.diffusion.tiny_folder import random_weights
from tests.models.diffusion.tiny_sd3_folder import CLIPS, T5, VAE_CHANGES, save_t5_tokenizer
from tests.models.diffusion.toy_tokenizer import END, save_toy_tokenizer

TRANSFORMER: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 64,
    "out_channels": None,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 12,
    "num_attention_heads": 2,
    "joint_attention_dim": 24,
    "pooled_projection_dim": 8,
    "guidance_embeds": True,
    "axes_dims_rope": [2, 4, 6],
}
CLIP = CLIPS[0]
# As published: the shift of dev follows from the size of the image, that of schnell is none.
SCHEDULERS: dict[str, dict[str, Any]] = {
    "dev": {
        "base_image_seq_len": 256,
        "base_shift": 0.5,
        "max_image_seq_len": 4096,
        "max_shift": 1.15,
        "num_train_timesteps": 1000,
        "shift": 3.0,
        "use_dynamic_shifting": True,
    },
    "schnell": {
        "base_image_seq_len": 256,
        "base_shift": 0.5,
        "max_image_seq_len": 4096,
        "max_shift": 1.15,
        "num_train_timesteps": 1000,
        "shift": 1.0,
        "use_dynamic_shifting": False,
    },
}
INDEX = {
    "_class_name": "FluxPipeline",
    "_diffusers_version": "0.35.0",
    "image_encoder": [None, None],
    "feature_extractor": [None, None],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "text_encoder_2": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "tokenizer_2": ["transformers", "T5TokenizerFast"],
    "transformer": ["diffusers", "FluxTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
_VAE = {
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "block_out_channels": [4, 8],
    "norm_num_groups": 2,
}


def save_flux_tokenizers(folder: Path, *, length: int = 77) -> tuple[Path, Path]:
    """Writes the folders of both tokenizers."""
    first = save_toy_tokenizer(folder / "tokenizer", pad_token=END, length=length)
    return first, save_t5_tokenizer(folder / "tokenizer_2")


def save_tiny_flux_folder(folder: Path, *, kind: str = "dev", clip_length: int = 8) -> Path:
    """Writes the folder; CLIP's prompts are short, so that it computes fast.

    Args:
      folder: Made.
      kind: "dev", which is told the guidance scale, or "schnell".
      clip_length: Ids of a prompt that CLIP reads.
    """
    parts: dict[str, Network] = {
        "transformer": Flux(read_flux_config(TRANSFORMER | {"guidance_embeds": kind == "dev"})),
        "vae": VAE(read_vae_config(_VAE | VAE_CHANGES)),
        "text_encoder": ClipText(read_clip_pooled_config(CLIP | {"max_position_embeddings": clip_length})),
        "text_encoder_2": T5Encoder(read_t5_config(T5)),
    }
    tokens = save_flux_tokenizers(folder.with_name(f"{folder.name}-tokenizers"), length=clip_length)
    files = FolderFiles(
        INDEX,
        {
            name: StoredPart(part.stored_config(), part.entries(), files_of(name, part).stem, (name,))
            for name, part in parts.items()
        },
        {"_class_name": "FlowMatchEulerDiscreteScheduler", **SCHEDULERS[kind]},
        {
            "tokenizer": load_clip_tokenizer(tokens[0], max_length=clip_length, vocab_size=600),
            "tokenizer_2": load_t5_tokenizer(tokens[1], length=512, vocab_size=300),
        },
    )
    write_model_folder(folder, files, {name: random_weights(part) for name, part in parts.items()}, None)
    return folder
