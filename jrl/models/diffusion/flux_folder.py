# SPDX-License-Identifier: Apache-2.0
"""Folders of FLUX.1: a transformer over packed latents, an autoencoder of images, a CLIP and a T5."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from jrl.models.diffusion.clip_config import read_clip_pooled_config
from jrl.models.diffusion.clip_text import ClipText
from jrl.models.diffusion.components import TOKENIZER, TRANSFORMER
from jrl.models.diffusion.described import (
    DescribedFolder,
    check_fits,
    described_part,
    described_schedule,
)
from jrl.models.diffusion.flux import Flux
from jrl.models.diffusion.flux_config import PACKED_EDGE, read_flux_config
from jrl.models.diffusion.flux_text import T5_LENGTH, FluxText
from jrl.models.diffusion.joined_context import FIRST, SECOND
from jrl.models.diffusion.pipeline import TEXT_ENCODER, UNET, VAE_PART
from jrl.models.diffusion.t5_config import read_t5_config
from jrl.models.diffusion.t5_encoder import T5Encoder
from jrl.models.diffusion.tokenizer import JoinedTokenizer, load_clip_tokenizer, load_t5_tokenizer
from jrl.models.diffusion.vae import VAE
from jrl.models.diffusion.vae_config import read_vae_config
from jrl.ops.flow_schedule import make_flow_schedule

_T5_TOKENIZER = "tokenizer_2"
_SAMPLE_SIZE = (128, 128)
"""Latents of an image where nobody asks for another size: the pipeline's own, for no config says one."""


def describe_flux_folder(folder: Path, components: tuple[str, ...]) -> DescribedFolder:
    """All of a folder but its weights.

    Args:
      folder: Of the pipeline.
      components: That are read of it: always the same.
    Raises:
      FileNotFoundError: If a config is missing.
      ValueError: If a config asks for what jrl lacks, or the parts do not fit each other.
    """
    del components
    transformer = Flux(described_part(folder / TRANSFORMER, read_flux_config))
    vae = VAE(described_part(folder / VAE_PART, read_vae_config))
    config = described_part(folder / FIRST, read_clip_pooled_config)
    clip, t5 = ClipText(config), T5Encoder(described_part(folder / SECOND, read_t5_config))
    _check_widths(folder, transformer, vae, config.hidden_size, t5)
    tokenizer = load_clip_tokenizer(
        folder / TOKENIZER, max_length=config.max_position_embeddings, vocab_size=config.vocab_size
    )
    t5_tokenizer = load_t5_tokenizer(
        folder / _T5_TOKENIZER, length=T5_LENGTH, vocab_size=t5.config.vocab_size
    )
    return DescribedFolder(
        unet=transformer,
        vae=vae,
        text_encoder=FluxText(clip, t5, clip_length=tokenizer.length),
        tokenizer=JoinedTokenizer((tokenizer, t5_tokenizer)),
        schedule=described_schedule(folder, partial(make_flow_schedule, spacing="uniform")),
        sample_size=_SAMPLE_SIZE,
        parts={TRANSFORMER: transformer, VAE_PART: vae, FIRST: clip, SECOND: t5},
        places={
            TRANSFORMER: (UNET,),
            VAE_PART: (VAE_PART,),
            FIRST: (TEXT_ENCODER, FIRST),
            SECOND: (TEXT_ENCODER, SECOND),
        },
        tokenizers={TOKENIZER: tokenizer, _T5_TOKENIZER: t5_tokenizer},
    )


def _check_widths(folder: Path, transformer: Flux, vae: VAE, clip_width: int, t5: T5Encoder) -> None:
    """The parts belong to each other."""
    config, square = transformer.config, PACKED_EDGE**2
    check_fits(
        folder / TRANSFORMER,
        (
            ("in_channels", config.in_channels, f"{square} * latent_channels of vae", square * vae.channels),
            ("pooled_projection_dim", config.pooled_projection_dim, f"hidden_size of {FIRST}", clip_width),
            ("joint_attention_dim", config.joint_attention_dim, f"d_model of {SECOND}", t5.config.d_model),
        ),
    )
