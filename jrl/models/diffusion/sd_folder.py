# SPDX-License-Identifier: Apache-2.0
"""Folders of Stable Diffusion 1 and 2: a U-Net, an autoencoder of images, and the text encoder of one CLIP."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jrl.models.diffusion.clip_config import read_clip_config
from jrl.models.diffusion.clip_text import ClipText
from jrl.models.diffusion.components import TOKENIZER
from jrl.models.diffusion.described import (
    CONFIG,
    DescribedFolder,
    check_fits,
    described_part,
    described_schedule,
)
from jrl.models.diffusion.pipeline import TEXT_ENCODER, UNET, VAE_PART
from jrl.models.diffusion.tokenizer import load_clip_tokenizer
from jrl.models.diffusion.unet import UNet
from jrl.models.diffusion.unet_config import read_unet_config
from jrl.models.diffusion.vae import VAE
from jrl.models.diffusion.vae_config import read_vae_config
from jrl.ops.noise_schedule import make_noise_schedule

_LEAST_SAMPLE_SIZE, _LEAST_VERSION = 64, (0, 9)


def describe_sd_folder(folder: Path, components: tuple[str, ...]) -> DescribedFolder:
    """All of a folder but its weights.

    Args:
      folder: Of the pipeline.
      components: That are read of it: always the same.
    Raises:
      FileNotFoundError: If a config is missing.
      ValueError: If a config asks for what jrl lacks, or the parts do not fit each other.
    """
    del components
    unet = UNet(described_part(folder / UNET, lambda values: read_unet_config(_sized(folder, values))))
    vae = VAE(described_part(folder / VAE_PART, read_vae_config))
    text_encoder = ClipText(described_part(folder / TEXT_ENCODER, read_clip_config))
    text = text_encoder.config
    check_fits(
        folder / UNET,
        (
            ("in_channels", unet.config.in_channels, "latent_channels of vae", vae.channels),
            ("out_channels", unet.config.out_channels, "in_channels", unet.config.in_channels),
            (
                "cross_attention_dim",
                unet.config.cross_attention_dim,
                "hidden_size of text_encoder",
                text.hidden_size,
            ),
        ),
    )
    schedule = described_schedule(folder, make_noise_schedule)
    tokenizer = load_clip_tokenizer(
        folder / TOKENIZER, max_length=text.max_position_embeddings, vocab_size=text.vocab_size
    )
    return DescribedFolder(
        unet=unet,
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        schedule=schedule,
        sample_size=_sample_size(unet),
        parts={UNET: unet, VAE_PART: vae, TEXT_ENCODER: text_encoder},
        places={name: (name,) for name in (UNET, VAE_PART, TEXT_ENCODER)},
        tokenizers={TOKENIZER: tokenizer},
    )


def _sized(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The denoiser's config with the size that diffusers gives to the folders of its first versions."""
    size, version = config.get("sample_size"), str(config.get("_diffusers_version", ""))
    parts = version.split(".")[:2]
    is_old = (
        len(parts) == 2
        and all(part.isdecimal() for part in parts)
        and tuple(map(int, parts)) < _LEAST_VERSION
    )
    if not is_old or not isinstance(size, int) or size >= _LEAST_SAMPLE_SIZE:
        return dict(config)
    warnings.warn(
        f"{folder / UNET / CONFIG}: `sample_size` {size} of a folder from diffusers {version} is read as "
        f"{_LEAST_SAMPLE_SIZE}, as diffusers does: its first versions wrote a wrong one.",
        stacklevel=7,
    )
    return {**config, "sample_size": _LEAST_SAMPLE_SIZE}


def _sample_size(unet: UNet) -> tuple[int, int]:
    size = unet.config.sample_size or _LEAST_SAMPLE_SIZE
    return (size, size) if isinstance(size, int) else (size[0], size[1])
