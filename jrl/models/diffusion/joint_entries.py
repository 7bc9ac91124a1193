# SPDX-License-Identifier: Apache-2.0
"""Tensors that transformers over two streams have in common: blocks of both, and the embedding of the timestep."""

from __future__ import annotations

from jrl.models.diffusion.entries import linear_entries, path_of
from jrl.models.diffusion.joint_block import Heads
from jrl.models.diffusion.modulation import TIME_CHANNELS
from jrl.models.families.base import Entry, vector


def time_text_entries(width: int, pooled_width: int, *, with_guidance: bool = False) -> list[Entry]:
    """The embedding of the timestep, of the pooled prompt and, if asked for, of the guidance scale."""
    inputs = {"timestep": TIME_CHANNELS} | ({"guidance": TIME_CHANNELS} if with_guidance else {})
    found = []
    for name, size in {**inputs, "text": pooled_width}.items():
        found += linear_entries(f"time_text_embed.{name}_embedder.linear_1", size, width)
        found += linear_entries(f"time_text_embed.{name}_embedder.linear_2", width, width)
    return found


def joint_block_entries(
    name: str, heads: Heads, *, is_dual: bool = False, is_last: bool = False
) -> list[Entry]:
    """A block of both streams."""
    width = heads.total
    found = [
        *linear_entries(f"{name}.norm1.linear", width, (9 if is_dual else 6) * width),
        *linear_entries(f"{name}.norm1_context.linear", width, (2 if is_last else 6) * width),
        *_attention_entries(heads, f"{name}.attn"),
        *_added_entries(heads, f"{name}.attn", makes_context=not is_last),
        *_feed_forward_entries(f"{name}.ff", width),
    ]
    if is_dual:
        found += _attention_entries(heads, f"{name}.attn2")
    return found if is_last else [*found, *_feed_forward_entries(f"{name}.ff_context", width)]


def heads_entries(heads: Heads, name: str) -> list[Entry]:
    """Queries, keys and values of a stream."""
    width = heads.total
    found = [entry for part in "qkv" for entry in linear_entries(f"{name}.to_{part}", width, width)]
    return [*found, *_norm_entries(heads, name, ("norm_q", "norm_k"))]


def _attention_entries(heads: Heads, name: str) -> list[Entry]:
    out = linear_entries(f"{name}.to_out.0", heads.total, heads.total, input_axes=2)
    return [*heads_entries(heads, name), *out]


def _added_entries(heads: Heads, name: str, *, makes_context: bool) -> list[Entry]:
    """What the prompt's tokens add to the joint attention."""
    width = heads.total
    found = [entry for part in "qkv" for entry in linear_entries(f"{name}.add_{part}_proj", width, width)]
    if makes_context:
        found += linear_entries(f"{name}.to_add_out", width, width, input_axes=2)
    return [*found, *_norm_entries(heads, name, ("norm_added_q", "norm_added_k"))]


def _norm_entries(heads: Heads, name: str, norms: tuple[str, str]) -> list[Entry]:
    """Scales of the norms of queries and keys, where there are some."""
    if not heads.is_normed:
        return []
    names = [f"{name}.{norm}" for norm in norms]
    return [Entry(f"{norm}.weight", (f"{path_of(norm)}/scale",), vector(), (heads.width,)) for norm in names]


def _feed_forward_entries(name: str, width: int) -> list[Entry]:
    return [
        *linear_entries(f"{name}.net.0.proj", width, 4 * width),
        *linear_entries(f"{name}.net.2", 4 * width, width),
    ]
