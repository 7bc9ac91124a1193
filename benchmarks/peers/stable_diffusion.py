# SPDX-License-Identifier: Apache-2.0
"""Sizes of Stable Diffusion for the workers of DDPO and for `benchmarks/ddpo.py`: the standard library alone.

Keys are those of diffusers' and transformers' configurations. `tiny` has the same structure and no more.
"""

from __future__ import annotations

from typing import Any

GUIDANCE = 5.0
"""Scale of classifier-free guidance, in sampling and in training."""
SCHEDULE = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "steps_offset": 1,
    "clip_sample": False,
}
_DOWN = ["CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"]
_UP = ["UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"]
_VAE = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 4,
    "scaling_factor": 0.18215,
}
MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "sd15": {
        "unet": {
            "sample_size": 64,
            "in_channels": 4,
            "out_channels": 4,
            "down_block_types": _DOWN,
            "up_block_types": _UP,
            "block_out_channels": [320, 640, 1280, 1280],
            "layers_per_block": 2,
            "cross_attention_dim": 768,
            "attention_head_dim": 8,
        },
        "vae": {
            **_VAE,
            "down_block_types": ["DownEncoderBlock2D"] * 4,
            "up_block_types": ["UpDecoderBlock2D"] * 4,
            "block_out_channels": [128, 256, 512, 512],
            "layers_per_block": 2,
            "sample_size": 512,
        },
        "text_encoder": {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "hidden_act": "quick_gelu",
            "max_position_embeddings": 77,
            "vocab_size": 49408,
        },
    },
    "tiny": {
        "unet": {
            "sample_size": 16,
            "in_channels": 4,
            "out_channels": 4,
            "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
            "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
            "block_out_channels": [16, 32],
            "layers_per_block": 1,
            "cross_attention_dim": 32,
            "attention_head_dim": 4,
            "norm_num_groups": 8,
        },
        "vae": {
            **_VAE,
            "down_block_types": ["DownEncoderBlock2D"] * 2,
            "up_block_types": ["UpDecoderBlock2D"] * 2,
            "block_out_channels": [8, 16],
            "layers_per_block": 1,
            "norm_num_groups": 4,
            "sample_size": 32,
        },
        "text_encoder": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "hidden_act": "quick_gelu",
            "max_position_embeddings": 8,
            "vocab_size": 128,
        },
    },
}


def betas() -> list[float]:
    """β of the thousand training timesteps."""
    start, end = SCHEDULE["beta_start"] ** 0.5, SCHEDULE["beta_end"] ** 0.5
    return [(start + (end - start) * number / 999) ** 2 for number in range(1000)]
