# SPDX-License-Identifier: Apache-2.0
"""A tiny Stable Diffusion XL of torch, saved by diffusers; every norm and bias is moved from its first value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from tests.models.diffusion.tiny_pipelines import perturb, tiny_vae
from tests.models.diffusion.tiny_sdxl_folder import CLIPS, SCHEDULER, UNET, VAE_CHANGES, save_sdxl_tokenizers


def tiny_sdxl_unet(**changes: Any) -> UNet2DConditionModel:
    """The denoiser, perturbed."""
    torch.manual_seed(0)
    unet = UNet2DConditionModel(**UNET | changes)
    assert isinstance(perturb(unet, 1), UNet2DConditionModel)
    return unet


def tiny_sdxl(
    folder: Path, *, zero_negative: bool = True, variant: str | None = None, **scheduler: Any
) -> StableDiffusionXLPipeline:
    """The pipeline, as it is and as diffusers saves it in `folder`.

    Args:
      folder: Made if missing.
      zero_negative: `force_zeros_for_empty_prompt`.
      variant: "fp16" names the files so, and stores float16.
      scheduler: Changes of its configuration.
    """
    tokenizers = save_sdxl_tokenizers(folder)
    torch.manual_seed(2)
    first = CLIPTextModel(CLIPTextConfig(**CLIPS[0]))
    second = CLIPTextModelWithProjection(CLIPTextConfig(**CLIPS[1]))
    pipeline = StableDiffusionXLPipeline(
        unet=tiny_sdxl_unet(),
        scheduler=EulerDiscreteScheduler.from_config(SCHEDULER | scheduler),
        vae=tiny_vae("A", **VAE_CHANGES),
        text_encoder=perturb(first, 3),
        text_encoder_2=perturb(second, 4),
        **{name: CLIPTokenizer.from_pretrained(path) for name, path in tokenizers.items()},
        force_zeros_for_empty_prompt=zero_negative,
        add_watermarker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    if variant == "fp16":
        pipeline = pipeline.to(torch.float16)
    pipeline.save_pretrained(folder, variant=variant)
    return pipeline
