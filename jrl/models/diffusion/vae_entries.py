# SPDX-License-Identifier: Apache-2.0
"""Every tensor of an autoencoder's file, and the two spellings that its attention has had."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jrl.models.diffusion.entries import conv_entries, linear_entries, norm_entries
from jrl.models.diffusion.unet_entries import resnet_entries
from jrl.models.diffusion.vae_config import VAEConfig
from jrl.models.families.base import Entry

# What diffusers called the projections before 0.13, and still finds in the files of Stable Diffusion.
_OLD_NAMES = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
_OLD = re.compile(r"(\.mid_block\.attentions\.0\.)(query|key|value|proj_attn)\.")


def vae_entries(config: VAEConfig) -> list[Entry]:
    """The table of an `AutoencoderKL`."""
    code = config.latent_channels
    found = _encoder_entries(config) + _decoder_entries(config)
    if config.use_quant_conv:
        found += conv_entries("quant_conv", 2 * code, 2 * code, 1)
    if config.use_post_quant_conv:
        found += conv_entries("post_quant_conv", code, code, 1)
    return found


def current_name(name: str) -> str:
    """Today's name of a tensor of any age."""
    return _OLD.sub(lambda match: f"{match[1]}{_OLD_NAMES[match[2]]}.", name)


def _encoder_entries(config: VAEConfig) -> list[Entry]:
    widths = config.block_out_channels
    found = conv_entries("encoder.conv_in", config.in_channels, widths[0], 3)
    found += _levels_entries("encoder.down_blocks", config.down_levels(), "downsamplers")
    found += _mid_entries(config, "encoder.mid_block")
    found += norm_entries("encoder.conv_norm_out", widths[-1])
    return found + conv_entries("encoder.conv_out", widths[-1], 2 * config.latent_channels, 3)


def _decoder_entries(config: VAEConfig) -> list[Entry]:
    widths = config.block_out_channels
    found = conv_entries("decoder.conv_in", config.latent_channels, widths[-1], 3)
    found += _mid_entries(config, "decoder.mid_block")
    found += _levels_entries("decoder.up_blocks", config.up_levels(), "upsamplers")
    found += norm_entries("decoder.conv_norm_out", widths[0])
    return found + conv_entries("decoder.conv_out", widths[0], config.out_channels, 3)


def _levels_entries(name: str, levels: Sequence[Sequence[tuple[int, int]]], resampler: str) -> list[Entry]:
    found = []
    for index, level in enumerate(levels):
        for number, (size_in, size_out) in enumerate(level):
            found += resnet_entries(f"{name}.{index}.resnets.{number}", size_in, size_out, None)
        if index < len(levels) - 1:
            width = level[-1][1]
            found += conv_entries(f"{name}.{index}.{resampler}.0.conv", width, width, 3)
    return found


def _mid_entries(config: VAEConfig, name: str) -> list[Entry]:
    width = config.block_out_channels[-1]
    found = []
    for index in (0, 1):
        found += resnet_entries(f"{name}.resnets.{index}", width, width, None)
    if config.mid_block_add_attention:
        attention = f"{name}.attentions.0"
        found += norm_entries(f"{attention}.group_norm", width)
        for part in ("to_q", "to_k", "to_v", "to_out.0"):
            found += linear_entries(f"{attention}.{part}", width, width)
    return found
