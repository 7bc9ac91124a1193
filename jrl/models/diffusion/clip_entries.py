# SPDX-License-Identifier: Apache-2.0
"""Every tensor of a CLIP text encoder's file, under the names that every transformers reads."""

from __future__ import annotations

from dataclasses import replace

from jrl.models.diffusion.clip_config import ClipProjectedConfig, ClipTextConfig, ClipTowerConfig
from jrl.models.diffusion.entries import linear_entries, norm_entries, path_of
from jrl.models.families.base import Entry, table

PREFIX, PROJECTION = "text_model.", "text_projection"
_IGNORED = "embeddings.position_ids"


def clip_entries(config: ClipTextConfig) -> list[Entry]:
    """The table of a `CLIPTextModel`, or of a `CLIPTextModelWithProjection`."""
    width = config.hidden_size
    found = [
        _table_entry("embeddings.token_embedding", config.vocab_size, width),
        _table_entry("embeddings.position_embedding", config.max_position_embeddings, width),
        *layer_entries(config),
        *norm_entries("final_layer_norm", width),
    ]
    named = [replace(entry, name=PREFIX + entry.name) for entry in found]
    if isinstance(config, ClipProjectedConfig):
        named += linear_entries(PROJECTION, width, config.projection_dim, bias=False)
    return named


def layer_entries(config: ClipTowerConfig) -> list[Entry]:
    """The layers of either encoder."""
    width, inner = config.hidden_size, config.intermediate_size
    found = []
    for index in range(config.num_hidden_layers):
        layer = f"encoder.layers.{index}"
        found += norm_entries(f"{layer}.layer_norm1", width)
        for part in ("q_proj", "k_proj", "v_proj"):
            found += linear_entries(f"{layer}.self_attn.{part}", width, width)
        found += linear_entries(f"{layer}.self_attn.out_proj", width, width, input_axes=2)
        found += norm_entries(f"{layer}.layer_norm2", width)
        found += linear_entries(f"{layer}.mlp.fc1", width, inner)
        found += linear_entries(f"{layer}.mlp.fc2", inner, width)
    return found


def current_name(name: str) -> str:
    """The table's name of a tensor: transformers from 5.6 on leaves the prefix away."""
    return name if name.startswith((PREFIX, PROJECTION)) else PREFIX + name


def is_ignored(name: str) -> bool:
    """True for tensors that only count positions from 0 on."""
    return name == PREFIX + _IGNORED


def _table_entry(name: str, num_rows: int, width: int) -> Entry:
    return Entry(f"{name}.weight", (f"{path_of(name)}/embedding",), table(), (num_rows, width))
