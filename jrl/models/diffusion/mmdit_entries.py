# SPDX-License-Identifier: Apache-2.0
"""Every tensor of a multimodal diffusion transformer's file: names and shapes follow from the config alone."""

from __future__ import annotations

from jrl.models.diffusion.entries import conv_entries, linear_entries, path_of
from jrl.models.diffusion.mmdit_config import MMDiTConfig
from jrl.models.families.base import Entry, table, vector

TIME_CHANNELS = 256
"""Sines and cosines of a timestep."""


def mmdit_entries(config: MMDiTConfig) -> list[Entry]:
    """The table of a `SD3Transformer2DModel`."""
    width, edge = config.width, config.pos_embed_max_size
    positions = Entry("pos_embed.pos_embed", ("pos_embed/position_bias",), table(), (1, edge**2, width))
    found = [
        positions,
        *conv_entries("pos_embed.proj", config.in_channels, width, config.patch_size),
        *linear_entries("time_text_embed.timestep_embedder.linear_1", TIME_CHANNELS, width),
        *linear_entries("time_text_embed.timestep_embedder.linear_2", width, width),
        *linear_entries("time_text_embed.text_embedder.linear_1", config.pooled_projection_dim, width),
        *linear_entries("time_text_embed.text_embedder.linear_2", width, width),
        *linear_entries("context_embedder", config.joint_attention_dim, width),
    ]
    for index in range(config.num_layers):
        found += _block_entries(config, index)
    return [
        *found,
        *linear_entries("norm_out.linear", width, 2 * width),
        *linear_entries("proj_out", width, config.patch_size**2 * config.channels_made),
    ]


def _block_entries(config: MMDiTConfig, index: int) -> list[Entry]:
    name, width = f"transformer_blocks.{index}", config.width
    is_dual, is_last = index in config.dual_attention_layers, index == config.num_layers - 1
    found = [
        *linear_entries(f"{name}.norm1.linear", width, (9 if is_dual else 6) * width),
        *linear_entries(f"{name}.norm1_context.linear", width, (2 if is_last else 6) * width),
        *_attention_entries(config, f"{name}.attn"),
        *_added_entries(config, f"{name}.attn", makes_context=not is_last),
        *_feed_forward_entries(f"{name}.ff", width),
    ]
    if is_dual:
        found += _attention_entries(config, f"{name}.attn2")
    return found if is_last else [*found, *_feed_forward_entries(f"{name}.ff_context", width)]


def _attention_entries(config: MMDiTConfig, name: str) -> list[Entry]:
    width = config.width
    found = [entry for part in "qkv" for entry in linear_entries(f"{name}.to_{part}", width, width)]
    found += linear_entries(f"{name}.to_out.0", width, width, input_axes=2)
    return [*found, *_norm_entries(config, name, ("norm_q", "norm_k"))]


def _added_entries(config: MMDiTConfig, name: str, *, makes_context: bool) -> list[Entry]:
    """What the prompt's tokens add to the joint attention."""
    width = config.width
    found = [entry for part in "qkv" for entry in linear_entries(f"{name}.add_{part}_proj", width, width)]
    if makes_context:
        found += linear_entries(f"{name}.to_add_out", width, width, input_axes=2)
    return [*found, *_norm_entries(config, name, ("norm_added_q", "norm_added_k"))]


def _norm_entries(config: MMDiTConfig, name: str, norms: tuple[str, str]) -> list[Entry]:
    """Scales of the norms of queries and keys, where there are some."""
    if config.qk_norm is None:
        return []
    names = [f"{name}.{norm}" for norm in norms]
    shape = (config.attention_head_dim,)
    return [Entry(f"{norm}.weight", (f"{path_of(norm)}/scale",), vector(), shape) for norm in names]


def _feed_forward_entries(name: str, width: int) -> list[Entry]:
    return [
        *linear_entries(f"{name}.net.0.proj", width, 4 * width),
        *linear_entries(f"{name}.net.2", 4 * width, width),
    ]
