# SPDX-License-Identifier: Apache-2.0
"""Every tensor of a FLUX.1 transformer's file: names and shapes follow from the config alone."""

from __future__ import annotations

from jrl.models.diffusion.entries import linear_entries
from jrl.models.diffusion.flux_config import FluxConfig
from jrl.models.diffusion.joint_entries import heads_entries, joint_block_entries, time_text_entries
from jrl.models.families.base import Entry


def flux_entries(config: FluxConfig) -> list[Entry]:
    """The table of a `FluxTransformer2DModel`."""
    width = config.width
    found = [
        *linear_entries("x_embedder", config.in_channels, width),
        *time_text_entries(width, config.pooled_projection_dim, with_guidance=config.guidance_embeds),
        *linear_entries("context_embedder", config.joint_attention_dim, width),
    ]
    for index in range(config.num_layers):
        found += joint_block_entries(f"transformer_blocks.{index}", config.heads)
    for index in range(config.num_single_layers):
        name = f"single_transformer_blocks.{index}"
        found += [
            *linear_entries(f"{name}.norm.linear", width, 3 * width),
            *heads_entries(config.heads, f"{name}.attn"),
            *linear_entries(f"{name}.proj_mlp", width, 4 * width),
            *linear_entries(f"{name}.proj_out", 5 * width, width),
        ]
    return [
        *found,
        *linear_entries("norm_out.linear", width, 2 * width),
        *linear_entries("proj_out", width, config.channels_made),
    ]
