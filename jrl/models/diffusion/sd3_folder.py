# SPDX-License-Identifier: Apache-2.0
"""Folders of Stable Diffusion 3 and 3.5: an MMDiT, an autoencoder of images, two CLIPs, and a T5 that may be absent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jrl.models.diffusion.clip_config import read_clip_projected_config
from jrl.models.diffusion.clip_pair import load_pair_tokenizers
from jrl.models.diffusion.clip_projection import ClipProjected
from jrl.models.diffusion.components import TOKENIZER, TRANSFORMER
from jrl.models.diffusion.described import (
    CONFIG,
    DescribedFolder,
    check_fits,
    described_part,
    described_schedule,
)
from jrl.models.diffusion.joined_context import FIRST, SECOND, THIRD
from jrl.models.diffusion.mmdit import MMDiT
from jrl.models.diffusion.mmdit_config import read_mmdit_config
from jrl.models.diffusion.pipeline import TEXT_ENCODER, UNET, VAE_PART
from jrl.models.diffusion.sd3_text import T5_LENGTH, SD3Text
from jrl.models.diffusion.t5_config import read_t5_config
from jrl.models.diffusion.t5_encoder import T5Encoder
from jrl.models.diffusion.tokenizer import JoinedTokenizer, load_t5_tokenizer
from jrl.models.diffusion.vae import VAE
from jrl.models.diffusion.vae_config import read_vae_config
from jrl.ops.flow_schedule import make_flow_schedule

_T5_TOKENIZER = "tokenizer_3"


def describe_sd3_folder(folder: Path, components: tuple[str, ...]) -> DescribedFolder:
    """All of a folder but its weights.

    Args:
      folder: Of the pipeline.
      components: That are read of it.
    Raises:
      FileNotFoundError: If a config is missing.
      ValueError: If a config asks for what jrl lacks, or the parts do not fit each other.
    """
    transformer = MMDiT(described_part(folder / TRANSFORMER, read_mmdit_config))
    vae = VAE(described_part(folder / VAE_PART, read_vae_config))
    clips = [
        ClipProjected(described_part(folder / name, read_clip_projected_config)) for name in (FIRST, SECOND)
    ]
    third = None
    if THIRD in components:
        third = T5Encoder(described_part(folder / THIRD, read_t5_config))
    _check_widths(folder, transformer, vae, clips, third)
    tokenizers = _tokenizers(folder, clips, third)
    text_encoder = SD3Text(
        first=clips[0],
        second=clips[1],
        third=third,
        clip_length=tokenizers[TOKENIZER].length,
        width=transformer.config.joint_attention_dim,
    )
    texts: dict[str, Any] = {FIRST: clips[0], SECOND: clips[1]} | ({} if third is None else {THIRD: third})
    size = transformer.config.sample_size
    return DescribedFolder(
        unet=transformer,
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=JoinedTokenizer(tuple(tokenizers.values())),
        schedule=described_schedule(folder, make_flow_schedule),
        sample_size=(size, size),
        parts={TRANSFORMER: transformer, VAE_PART: vae, **texts},
        places={
            TRANSFORMER: (UNET,),
            VAE_PART: (VAE_PART,),
            **{name: (TEXT_ENCODER, name) for name in texts},
        },
        tokenizers=tokenizers,
    )


def _tokenizers(folder: Path, clips: list[ClipProjected], third: T5Encoder | None) -> dict[str, Any]:
    """Tokenizers by folder, in the order of the encoders."""
    pair = load_pair_tokenizers(folder, {FIRST: clips[0].config, SECOND: clips[1].config})
    found: dict[str, Any] = dict(pair)
    if third is not None:
        found[_T5_TOKENIZER] = load_t5_tokenizer(
            folder / _T5_TOKENIZER, length=T5_LENGTH, vocab_size=third.config.vocab_size
        )
    return found


def _check_widths(
    folder: Path, transformer: MMDiT, vae: VAE, clips: list[ClipProjected], third: T5Encoder | None
) -> None:
    """The parts belong to each other."""
    config = transformer.config
    pooled = sum(clip.config.projection_dim for clip in clips)
    width = sum(clip.config.hidden_size for clip in clips)
    joint = config.joint_attention_dim
    check_fits(
        folder / TRANSFORMER,
        (
            ("in_channels", config.in_channels, "latent_channels of vae", vae.channels),
            ("out_channels", config.channels_made, "in_channels", config.in_channels),
            (
                "pooled_projection_dim",
                config.pooled_projection_dim,
                f"projection_dim of {FIRST} and {SECOND} together",
                pooled,
            ),
            ("joint_attention_dim", joint, f"d_model of {THIRD}", third.config.d_model if third else joint),
        ),
    )
    if width > joint:
        raise ValueError(
            f"{folder / TRANSFORMER / CONFIG}: `joint_attention_dim` must be at least {width}, the hidden_size of "
            f"{FIRST} and {SECOND} together; got {joint}. Are all parts of one model?"
        )
