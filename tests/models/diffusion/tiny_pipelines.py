# SPDX-License-Identifier: Apache-2.0
"""Tiny Stable Diffusion pipelines of torch, saved by diffusers: A is built as version 1 is, B as version 2 is.

Every norm, bias and zero-initialised layer is moved away from its initial value: else a wrong epsilon, bias or scale
would not be seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    PNDMScheduler,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from tests.models.diffusion.toy_tokenizer import END, save_toy_tokenizer

# Tensors this small are slower with threads.
torch.set_num_threads(1)

SCHEDULE = {
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "steps_offset": 1,
    "set_alpha_to_one": False,
}
UNETS: Mapping[str, dict[str, Any]] = {
    "A": {
        "block_out_channels": (4, 8),
        "layers_per_block": 1,
        "sample_size": 32,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": 8,
        "attention_head_dim": 8,
        "norm_num_groups": 2,
    },
    "B": {
        "block_out_channels": (32, 64),
        "layers_per_block": 2,
        "sample_size": 32,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": 32,
        "attention_head_dim": (2, 4),
        "use_linear_projection": True,
    },
}
VAES: Mapping[str, dict[str, Any]] = {
    "A": {"block_out_channels": [4, 8], "norm_num_groups": 2, "sample_size": 64},
    "B": {"block_out_channels": [32, 64], "sample_size": 128},
}
TEXT_ENCODERS: Mapping[str, dict[str, Any]] = {
    "A": {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_act": "quick_gelu",
    },
    "B": {
        "hidden_size": 32,
        "intermediate_size": 37,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "hidden_act": "gelu",
        "projection_dim": 512,
    },
}
PAD_TOKENS: Mapping[str, str] = {"A": END, "B": "!"}


def perturb(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Norm scales become N(1, 0.3); biases, norm biases and whatever is all 0 become N(0, 0.3); in place."""
    generator = torch.Generator().manual_seed(seed)
    norms = torch.nn.GroupNorm | torch.nn.LayerNorm
    scales = {f"{name}.weight" for name, part in module.named_modules() if isinstance(part, norms)}
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name in scales or name.endswith("bias") or not parameter.any():
                noise = 0.3 * torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise + float(name in scales))
    return module.eval()


def tiny_unet(kind: str, seed: int = 0, **changes: Any) -> UNet2DConditionModel:
    """The U-Net of pipeline "A" or "B", perturbed."""
    torch.manual_seed(seed)
    return perturb(UNet2DConditionModel(**UNETS[kind] | changes), seed + 1)


def tiny_vae(kind: str, seed: int = 0, **changes: Any) -> AutoencoderKL:
    """The autoencoder, perturbed."""
    torch.manual_seed(seed)
    fixed = {
        "in_channels": 3,
        "out_channels": 3,
        "down_block_types": ["DownEncoderBlock2D"] * 2,
        "up_block_types": ["UpDecoderBlock2D"] * 2,
        "latent_channels": 4,
    }
    return perturb(AutoencoderKL(**fixed | VAES[kind] | changes), seed + 2)


def tiny_text_encoder(kind: str, seed: int = 0, **changes: Any) -> CLIPTextModel:
    """The text encoder, perturbed."""
    torch.manual_seed(seed)
    config = CLIPTextConfig(vocab_size=1000, max_position_embeddings=77, **TEXT_ENCODERS[kind] | changes)
    model = CLIPTextModel(config)
    assert isinstance(perturb(model, seed + 3), CLIPTextModel)
    return model


def tiny_pipeline(
    kind: str,
    folder: Path,
    *,
    seed: int = 0,
    scheduler: str = "DDIM",
    prediction_type: str = "epsilon",
    variant: str | None = None,
) -> StableDiffusionPipeline:
    """A whole pipeline, as it is and as diffusers saves it in `folder`.

    Args:
      kind: "A" or "B".
      folder: Made if missing.
      seed: Of the weights.
      scheduler: "DDIM", or "PNDM" as the checkpoints of Stable Diffusion have it.
      prediction_type: Of the scheduler.
      variant: "fp16" names the files so, and stores float16.
    """
    changes: dict[str, Any] = {"clip_sample": False} if scheduler == "DDIM" else {"skip_prk_steps": True}
    make = {"DDIM": DDIMScheduler, "PNDM": PNDMScheduler}[scheduler]
    pipeline = StableDiffusionPipeline(
        unet=tiny_unet(kind, seed),
        vae=tiny_vae(kind, seed),
        text_encoder=tiny_text_encoder(kind, seed),
        tokenizer=CLIPTokenizer.from_pretrained(
            save_toy_tokenizer(folder / "tokenizer", pad_token=PAD_TOKENS[kind])
        ),
        scheduler=make(**SCHEDULE, prediction_type=prediction_type, **changes),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    if variant == "fp16":
        pipeline = pipeline.to(torch.float16)
    pipeline.save_pretrained(folder, variant=variant)
    return pipeline
