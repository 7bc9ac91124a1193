# SPDX-License-Identifier: Apache-2.0
"""Every tensor of a multimodal diffusion transformer's file: names and shapes follow from the config alone."""

from __future__ import annotations

from jrl.models.diffusion.entries import conv_entries, linear_entries
from jrl.models.diffusion.joint_entries import joint_block_entries, time_text_entries
from jrl.models.diffusion.mmdit_config import MMDiTConfig
from jrl.models.families.base import Entry, table


def mmdit_entries(config: MMDiTConfig) -> list[Entry]:
    """The table of a `SD3Transformer2DModel`."""
    width, edge = config.width, config.pos_embed_max_size
    positions = Entry("pos_embed.pos_embed", ("pos_embed/position_bias",), table(), (1, edge**2, width))
    found = [
        positions,
        *conv_entries("pos_embed.proj", config.in_channels, width, config.patch_size),
        *time_text_entries(width, config.pooled_projection_dim),
        *linear_entries("context_embedder", config.joint_attention_dim, width),
    ]
    for index in range(config.num_layers):
        found += joint_block_entries(
            f"transformer_blocks.{index}",
            config.heads,
            is_dual=index in config.dual_attention_layers,
            is_last=index == config.num_layers - 1,
        )
    return [
        *found,
        *linear_entries("norm_out.linear", width, 2 * width),
        *linear_entries("proj_out", width, config.patch_size**2 * config.channels_made),
    ]
