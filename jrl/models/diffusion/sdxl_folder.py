# SPDX-License-Identifier: Apache-2.0
"""Folders of Stable Diffusion XL: a U-Net that reads sizes of the image, an autoencoder of images, and two CLIPs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jrl.models.diffusion.clip_config import read_clip_config, read_clip_projected_config
from jrl.models.diffusion.clip_pair import load_pair_tokenizers
from jrl.models.diffusion.clip_projection import ClipProjected
from jrl.models.diffusion.clip_text import ClipText
from jrl.models.diffusion.components import MODEL_INDEX, TOKENIZER
from jrl.models.diffusion.config_values import FLAG, read_values
from jrl.models.diffusion.described import (
    DescribedFolder,
    check_fits,
    described_part,
    described_schedule,
)
from jrl.models.diffusion.joined_context import FIRST, SECOND
from jrl.models.diffusion.pipeline import TEXT_ENCODER, UNET, VAE_PART
from jrl.models.diffusion.sdxl_text import SDXLText
from jrl.models.diffusion.tokenizer import JoinedTokenizer
from jrl.models.diffusion.unet import UNet
from jrl.models.diffusion.unet_config import TEXT_TIME, UNetConfig, read_unet_config
from jrl.models.diffusion.vae import VAE
from jrl.models.diffusion.vae_config import read_vae_config
from jrl.models.hub import named_folder, read_json
from jrl.ops.noise_schedule import make_noise_schedule

_SAMPLE_SIZE = 128
_ZEROS = "force_zeros_for_empty_prompt"
# The mark that diffusers prints into finished images is no part of the model: rewards see images without it.
_SILENT = ("add_watermarker",)


def describe_sdxl_folder(folder: Path, components: tuple[str, ...]) -> DescribedFolder:
    """All of a folder but its weights.

    Args:
      folder: Of the pipeline.
      components: That are read of it: always the same.
    Raises:
      FileNotFoundError: If a config is missing.
      ValueError: If a config asks for what jrl lacks, or the parts do not fit each other.
    """
    del components
    vae = VAE(described_part(folder / VAE_PART, read_vae_config))
    unet = UNet(described_part(folder / UNET, _read_unet), image_factor=vae.factor)
    first = ClipText(described_part(folder / FIRST, read_clip_config))
    second = ClipProjected(described_part(folder / SECOND, read_clip_projected_config))
    _check_widths(folder, unet.config, vae, first, second)
    tokenizers = load_pair_tokenizers(folder, {FIRST: first.config, SECOND: second.config})
    size = unet.config.sample_size or _SAMPLE_SIZE
    return DescribedFolder(
        unet=unet,
        vae=vae,
        text_encoder=SDXLText(first, second, clip_length=tokenizers[TOKENIZER].length),
        tokenizer=JoinedTokenizer(tuple(tokenizers.values())),
        schedule=described_schedule(folder, make_noise_schedule),
        sample_size=(size, size) if isinstance(size, int) else (size[0], size[1]),
        parts={UNET: unet, VAE_PART: vae, FIRST: first, SECOND: second},
        places={
            UNET: (UNET,),
            VAE_PART: (VAE_PART,),
            **{name: (TEXT_ENCODER, name) for name in (FIRST, SECOND)},
        },
        tokenizers=tokenizers,
        zero_negative=_zero_negative(folder),
    )


def _read_unet(values: Mapping[str, Any]) -> UNetConfig:
    config = read_unet_config(values)
    if config.addition_embed_type is None:
        raise ValueError(
            f"`addition_embed_type` must be {TEXT_TIME!r} in Stable Diffusion XL, whose U-Net reads the pooled prompt; "
            "got None."
        )
    return config


def _zero_negative(folder: Path) -> bool:
    """Setting of the pipeline's index: an empty negative prompt is a context of zeros."""
    settings = {
        name: value for name, value in read_json(folder / MODEL_INDEX).items() if not isinstance(value, list)
    }
    with named_folder(folder):
        found = read_values(MODEL_INDEX, settings, {_ZEROS: FLAG}, {}, _SILENT)
    return bool(found.get(_ZEROS, True))


def _check_widths(folder: Path, config: UNetConfig, vae: VAE, first: ClipText, second: ClipProjected) -> None:
    """The parts belong to each other."""
    width = first.config.hidden_size + second.config.hidden_size
    sizes = (config.projection_class_embeddings_input_dim or 0) - config.pooled_width
    check_fits(
        folder / UNET,
        (
            ("in_channels", config.in_channels, "latent_channels of vae", vae.channels),
            ("out_channels", config.out_channels, "in_channels", config.in_channels),
            (
                "cross_attention_dim",
                config.cross_attention_dim,
                f"hidden_size of {FIRST} and {SECOND} together",
                width,
            ),
            (
                "projection_class_embeddings_input_dim",
                config.projection_class_embeddings_input_dim,
                f"projection_dim of {SECOND} and 6 * `addition_time_embed_dim`",
                second.config.projection_dim + sizes,
            ),
        ),
    )
