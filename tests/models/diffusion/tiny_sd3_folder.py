# SPDX-License-Identifier: Apache-2.0
"""A folder of a tiny Stable Diffusion 3, written by jrl without torch; nothing is compiled for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jrl.models.diffusion.clip_config import read_clip_projected_config
from jrl.models.diffusion.clip_projection import ClipProjected
from jrl.models.diffusion.mmdit import MMDiT
from jrl.models.diffusion.mmdit_config import read_mmdit_config
from jrl.models.diffusion.part_files import PART_FILES, Network
from jrl.models.diffusion.saving import FolderFiles, StoredPart, write_model_folder
from jrl.models.diffusion.t5_config import read_t5_config
from jrl.models.diffusion.t5_encoder import T5Encoder
from jrl.models.diffusion.tokenizer import load_clip_tokenizer, load_t5_tokenizer
from jrl.models.diffusion.vae import VAE
from jrl.models.diffusion.vae_config import read_vae_config
from tests.models.diffusion.tiny_folder import random_weights
from tests.models.diffusion.toy_tokenizer import END, save_toy_tokenizer

TRANSFORMER: dict[str, Any] = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 16,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "joint_attention_dim": 24,
    "caption_projection_dim": 16,
    "pooled_projection_dim": 10,
    "out_channels": 16,
    "pos_embed_max_size": 8,
    "dual_attention_layers": [0],
    "qk_norm": "rms_norm",
}
_CLIP: dict[str, Any] = {
    "vocab_size": 600,
    "max_position_embeddings": 77,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}
# As published: the first encoder's config says 2 where the id of the end is meant, and the second one pads with "!".
CLIPS: tuple[dict[str, Any], ...] = (
    _CLIP
    | {
        "hidden_size": 8,
        "intermediate_size": 12,
        "projection_dim": 4,
        "eos_token_id": 2,
        "hidden_act": "quick_gelu",
    },
    _CLIP
    | {
        "hidden_size": 12,
        "intermediate_size": 16,
        "projection_dim": 6,
        "eos_token_id": 525,
        "hidden_act": "gelu",
    },
)
PADS = (END, "!")
T5: dict[str, Any] = {
    "vocab_size": 300,
    "d_model": 24,
    "d_kv": 6,
    "d_ff": 20,
    "num_layers": 2,
    "num_heads": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}
VAE_CHANGES: dict[str, Any] = {
    "latent_channels": 16,
    "scaling_factor": 1.5305,
    "shift_factor": 0.0609,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
SCHEDULER: dict[str, Any] = {"shift": 3.0, "num_train_timesteps": 1000}
INDEX = {
    "_class_name": "StableDiffusion3Pipeline",
    "_diffusers_version": "0.35.0",
    "image_encoder": [None, None],
    "feature_extractor": [None, None],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModelWithProjection"],
    "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
    "text_encoder_3": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "tokenizer_2": ["transformers", "CLIPTokenizer"],
    "tokenizer_3": ["transformers", "T5TokenizerFast"],
    "transformer": ["diffusers", "SD3Transformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
_VAE = {
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "block_out_channels": [4, 8],
    "norm_num_groups": 2,
}


def save_t5_tokenizer(folder: Path) -> Path:
    """Writes a T5 tokenizer of single letters."""
    from transformers import T5TokenizerFast

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(letter, -3.0) for letter in "abcdefghijklmnopqrstuvwxyz"] + [("red", -3.0), ("cat", -3.5)]
    T5TokenizerFast(vocab=pieces, extra_ids=0).save_pretrained(folder)
    return folder


def save_sd3_tokenizers(folder: Path, *, length: int = 77) -> tuple[Path, Path, Path]:
    """Writes the folders of all three tokenizers."""
    first, second = (
        save_toy_tokenizer(folder / name, pad_token=pad, length=length)
        for name, pad in zip(("tokenizer", "tokenizer_2"), PADS, strict=True)
    )
    return first, second, save_t5_tokenizer(folder / "tokenizer_3")


def tiny_sd3_parts(clip_length: int) -> dict[str, Network]:
    """All networks, by folder."""
    first, second = (
        ClipProjected(read_clip_projected_config(clip | {"max_position_embeddings": clip_length}))
        for clip in CLIPS
    )
    return {
        "transformer": MMDiT(read_mmdit_config(TRANSFORMER)),
        "vae": VAE(read_vae_config(_VAE | VAE_CHANGES)),
        "text_encoder": first,
        "text_encoder_2": second,
        "text_encoder_3": T5Encoder(read_t5_config(T5)),
    }


def save_tiny_sd3_folder(folder: Path, *, clip_length: int = 8) -> Path:
    """Writes the folder; prompts are short, so that it computes fast."""
    parts = tiny_sd3_parts(clip_length)
    tokens = save_sd3_tokenizers(folder.with_name(f"{folder.name}-tokenizers"), length=clip_length)
    files = FolderFiles(
        INDEX,
        {
            name: StoredPart(part.stored_config(), part.entries(), PART_FILES[name].stem, (name,))
            for name, part in parts.items()
        },
        {"_class_name": "FlowMatchEulerDiscreteScheduler", **SCHEDULER},
        {
            "tokenizer": load_clip_tokenizer(tokens[0], max_length=clip_length, vocab_size=600),
            "tokenizer_2": load_clip_tokenizer(tokens[1], max_length=clip_length, vocab_size=600),
            "tokenizer_3": load_t5_tokenizer(tokens[2], length=256, vocab_size=300),
        },
    )
    write_model_folder(folder, files, {name: random_weights(part) for name, part in parts.items()}, None)
    return folder
