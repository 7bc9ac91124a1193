# SPDX-License-Identifier: Apache-2.0
"""A tiny FLUX.1 of torch, saved by diffusers; every norm and bias is moved from its first value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5TokenizerFast

from tests.models.diffusion.tiny_flux_folder import CLIP, SCHEDULERS, TRANSFORMER, save_flux_tokenizers
from tests.models.diffusion.tiny_pipelines import perturb, tiny_vae
from tests.models.diffusion.tiny_sd3 import tiny_t5
from tests.models.diffusion.tiny_sd3_folder import VAE_CHANGES


def tiny_transformer(**changes: Any) -> FluxTransformer2DModel:
    """The denoiser, perturbed."""
    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(**TRANSFORMER | changes)
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            if ".norm_" in name:  # RMS norms of queries and keys
                parameter += 0.3 * torch.randn(parameter.shape)
    assert isinstance(perturb(transformer, 1), FluxTransformer2DModel)
    return transformer


def tiny_clip(**changes: Any) -> CLIPTextModel:
    """The text encoder whose pooled state is read, perturbed."""
    torch.manual_seed(0)
    model = CLIPTextModel(CLIPTextConfig(**CLIP | changes))
    assert isinstance(perturb(model, 3), CLIPTextModel)
    return model


def tiny_flux(
    folder: Path,
    *,
    kind: str = "dev",
    variant: str | None = None,
    clip: dict[str, Any] | None = None,
    **scheduler: Any,
) -> FluxPipeline:
    """The pipeline, as it is and as diffusers saves it in `folder`.

    Args:
      folder: Made if missing.
      kind: "dev", which is told the guidance scale, or "schnell".
      variant: "fp16" names the files so, and stores float16.
      clip: Changes of the text encoder's configuration.
      scheduler: Changes of its configuration.
    """
    first, second = save_flux_tokenizers(folder)
    pipeline = FluxPipeline(
        transformer=tiny_transformer(guidance_embeds=kind == "dev"),
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULERS[kind] | scheduler),
        vae=tiny_vae("A", **VAE_CHANGES),
        text_encoder=tiny_clip(**clip or {}),
        tokenizer=CLIPTokenizer.from_pretrained(first),
        text_encoder_2=tiny_t5(),
        tokenizer_2=T5TokenizerFast.from_pretrained(second),
    )
    pipeline.set_progress_bar_config(disable=True)
    if variant == "fp16":
        pipeline = pipeline.to(torch.float16)
    pipeline.save_pretrained(folder, variant=variant)
    return pipeline
