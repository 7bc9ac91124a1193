# SPDX-License-Identifier: Apache-2.0
"""Every tensor of a U-Net's file: names and shapes follow from the config alone."""

from __future__ import annotations

from jrl.models.diffusion.entries import conv_entries, linear_entries, norm_entries
from jrl.models.diffusion.unet_config import Level, UNetConfig
from jrl.models.families.base import Entry


def unet_entries(config: UNetConfig) -> list[Entry]:
    """The table of a `UNet2DConditionModel`."""
    widths = config.block_out_channels
    found = [
        *conv_entries("conv_in", config.in_channels, widths[0], 3),
        *linear_entries("time_embedding.linear_1", widths[0], config.time_width),
        *linear_entries("time_embedding.linear_2", config.time_width, config.time_width),
    ]
    if config.projection_class_embeddings_input_dim is not None:
        added = config.projection_class_embeddings_input_dim
        found += linear_entries("add_embedding.linear_1", added, config.time_width)
        found += linear_entries("add_embedding.linear_2", config.time_width, config.time_width)
    for index, level in enumerate(config.down_levels()):
        found += _level_entries(config, f"down_blocks.{index}", level, "downsamplers")
    middle = widths[-1]
    found += resnet_entries("mid_block.resnets.0", middle, middle, config.time_width)
    found += _transformer_entries(config, "mid_block.attentions.0", middle, config.mid_level().num_layers)
    found += resnet_entries("mid_block.resnets.1", middle, middle, config.time_width)
    for index, level in enumerate(config.up_levels()):
        found += _level_entries(config, f"up_blocks.{index}", level, "upsamplers")
    return [
        *found,
        *norm_entries("conv_norm_out", widths[0]),
        *conv_entries("conv_out", widths[0], config.out_channels, 3),
    ]


def resnet_entries(name: str, size_in: int, size_out: int, time_width: int | None) -> list[Entry]:
    """A residual block; without `time_width`, of a network that knows no timestep."""
    found = [
        *norm_entries(f"{name}.norm1", size_in),
        *conv_entries(f"{name}.conv1", size_in, size_out, 3),
        *norm_entries(f"{name}.norm2", size_out),
        *conv_entries(f"{name}.conv2", size_out, size_out, 3),
    ]
    if time_width is not None:
        found += linear_entries(f"{name}.time_emb_proj", time_width, size_out)
    if size_in != size_out:
        found += conv_entries(f"{name}.conv_shortcut", size_in, size_out, 1)
    return found


def _level_entries(config: UNetConfig, name: str, level: Level, resampler: str) -> list[Entry]:
    found = []
    for index, (size_in, size_out) in enumerate(level.resnets):
        found += resnet_entries(f"{name}.resnets.{index}", size_in, size_out, config.time_width)
        if level.num_heads is not None:
            found += _transformer_entries(config, f"{name}.attentions.{index}", size_out, level.num_layers)
    if level.resamples:
        width = level.resnets[-1][1]
        found += conv_entries(f"{name}.{resampler}.0.conv", width, width, 3)
    return found


def _transformer_entries(config: UNetConfig, name: str, width: int, num_layers: int) -> list[Entry]:
    found = norm_entries(f"{name}.norm", width)
    for end in ("proj_in", "proj_out"):
        if config.use_linear_projection:
            found += linear_entries(f"{name}.{end}", width, width)
        else:
            found += conv_entries(f"{name}.{end}", width, width, 1)
    for index in range(num_layers):
        block = f"{name}.transformer_blocks.{index}"
        for norm in ("norm1", "norm2", "norm3"):
            found += norm_entries(f"{block}.{norm}", width)
        found += _attention_entries(f"{block}.attn1", width, width)
        found += _attention_entries(f"{block}.attn2", width, config.cross_attention_dim)
        found += linear_entries(f"{block}.ff.net.0.proj", width, 8 * width)
        found += linear_entries(f"{block}.ff.net.2", 4 * width, width)
    return found


def _attention_entries(name: str, width: int, context_width: int) -> list[Entry]:
    return [
        *linear_entries(f"{name}.to_q", width, width, bias=False),
        *linear_entries(f"{name}.to_k", context_width, width, bias=False),
        *linear_entries(f"{name}.to_v", context_width, width, bias=False),
        *linear_entries(f"{name}.to_out.0", width, width, input_axes=2),
    ]
