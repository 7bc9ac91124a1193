# SPDX-License-Identifier: Apache-2.0
"""A tiny Stable Diffusion 3 of torch, saved by diffusers; every norm and bias is moved from its first value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

from tests.models.diffusion.tiny_pipelines import perturb, tiny_vae
from tests.models.diffusion.tiny_sd3_folder import (
    CLIPS,
    SCHEDULER,
    T5,
    TRANSFORMER,
    VAE_CHANGES,
    save_sd3_tokenizers,
)


def tiny_transformer(**changes: Any) -> SD3Transformer2DModel:
    """The denoiser, perturbed."""
    torch.manual_seed(0)
    transformer = SD3Transformer2DModel(**TRANSFORMER | changes)
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            if ".norm_" in name:  # of queries and keys: an RMSNorm of diffusers' own
                parameter += 0.3 * torch.randn(parameter.shape)
    assert isinstance(perturb(transformer, 1), SD3Transformer2DModel)
    return transformer


def tiny_clip(number: int) -> CLIPTextModelWithProjection:
    """A text encoder, perturbed."""
    torch.manual_seed(number)
    model = CLIPTextModelWithProjection(CLIPTextConfig(**CLIPS[number]))
    assert isinstance(perturb(model, number + 3), CLIPTextModelWithProjection)
    return model


def tiny_t5() -> T5EncoderModel:
    """The third text encoder, in evaluation: T5 has dropout."""
    torch.manual_seed(7)
    model = T5EncoderModel(T5Config(**T5))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layer_norm" in name:
                parameter += 0.3 * torch.randn(parameter.shape)
    return model.eval()


def tiny_sd3(
    folder: Path, *, with_t5: bool = True, variant: str | None = None, **scheduler: Any
) -> StableDiffusion3Pipeline:
    """The pipeline, as it is and as diffusers saves it in `folder`.

    Args:
      folder: Made if missing.
      with_t5: Whether there is a third text encoder.
      variant: "fp16" names the files so, and stores float16.
      scheduler: Changes of its configuration.
    """
    first, second, third = save_sd3_tokenizers(folder)
    pipeline = StableDiffusion3Pipeline(
        transformer=tiny_transformer(),
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER | scheduler),
        vae=tiny_vae("A", **VAE_CHANGES),
        text_encoder=tiny_clip(0),
        tokenizer=CLIPTokenizer.from_pretrained(first),
        text_encoder_2=tiny_clip(1),
        tokenizer_2=CLIPTokenizer.from_pretrained(second),
        text_encoder_3=tiny_t5() if with_t5 else None,
        tokenizer_3=T5TokenizerFast.from_pretrained(third) if with_t5 else None,
    )
    pipeline.set_progress_bar_config(disable=True)
    if variant == "fp16":
        pipeline = pipeline.to(torch.float16)
    pipeline.save_pretrained(folder, variant=variant)
    return pipeline
