# SPDX-License-Identifier: Apache-2.0
"""Names of a denoiser's modules in the code that it was published with, by which other trainers call them.

The U-Nets of Stable Diffusion count input, middle and output blocks through all levels. FLUX.1 joins queries, keys and
values in one map, and in its single blocks the feed-forward layer too. Stable Diffusion 3 has none here, nor has
the modulation of FLUX.1's last layer, whose halves diffusers holds the other way round.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_RESNET: Mapping[str, str] = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_UNET_OUTER: Mapping[str, str] = {
    "conv_in": "input_blocks.0.0",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
_LEVEL = re.compile(r"(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.(.+)")
_MIDDLE = re.compile(r"mid_block\.(resnets|attentions)\.(\d+)\.(.+)")

_FLUX_OUTER: Mapping[str, str] = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "final_layer.linear": "proj_out",
    **{
        f"{theirs}.{layer}_layer": f"time_text_embed.{ours}_embedder.linear_{number}"
        for theirs, ours in (("time_in", "timestep"), ("vector_in", "text"), ("guidance_in", "guidance"))
        for layer, number in (("in", 1), ("out", 2))
    },
}
_FLUX_DOUBLE: Mapping[str, tuple[str, ...]] = {
    "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "img_attn.proj": ("attn.to_out.0",),
    "img_mlp.0": ("ff.net.0.proj",),
    "img_mlp.2": ("ff.net.2",),
    "img_mod.lin": ("norm1.linear",),
    "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "txt_attn.proj": ("attn.to_add_out",),
    "txt_mlp.0": ("ff_context.net.0.proj",),
    "txt_mlp.2": ("ff_context.net.2",),
    "txt_mod.lin": ("norm1_context.linear",),
}
_FLUX_SINGLE: Mapping[str, tuple[str, ...]] = {
    "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
    "linear2": ("proj_out",),
    "modulation.lin": ("norm.linear",),
}


def original_modules(modules: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Modules by their original name.

    Args:
      modules: Names of all modules of a denoiser, in diffusers' words.
    Returns:
      Original name → the modules whose outputs, one behind the other, are those of the original one. Empty for a
      network of which no other code is known.
    """
    known = set(modules)
    if any(name.startswith("down_blocks.") for name in known):
        # Residual blocks of a level on the way down, and the change of size behind them.
        per_level = 1 + len(
            {name.split(".")[3] for name in known if name.startswith("down_blocks.0.resnets.")}
        )
        return {original: (name,) for name in known if (original := _unet_name(name, known, per_level))}
    if any(name.startswith("single_transformer_blocks.") for name in known):
        return _flux_names(known)
    return {}


def _unet_name(name: str, known: set[str], per_level: int) -> str | None:
    """Original name of a U-Net's module; None where it has none."""
    if match := _MIDDLE.fullmatch(name):
        kind, index, rest = match.groups()
        place = 1 if kind == "attentions" else 2 * int(index)
        return f"middle_block.{place}.{_inner(kind, rest)}"
    match = _LEVEL.fullmatch(name)
    if match is None:
        return _UNET_OUTER.get(name)
    way, level, kind, index, rest = match.groups()
    start = int(level) * per_level
    if way == "down":
        block, place = 1 + start + int(index), 1 if kind == "attentions" else 0
        block = start + per_level if kind == "downsamplers" else block
        return f"input_blocks.{block}.{place}.{_inner(kind, rest)}"
    block, place = start + int(index), 1 if kind == "attentions" else 0
    if kind == "upsamplers":
        has_attention = any(one.startswith(f"up_blocks.{level}.attentions.") for one in known)
        block, place = start + per_level - 1, 1 + has_attention
    return f"output_blocks.{block}.{place}.{_inner(kind, rest)}"


def _inner(kind: str, rest: str) -> str:
    """A module's name within its block."""
    if kind == "resnets":
        return _RESNET[rest]
    return {"downsamplers": "op", "upsamplers": "conv"}.get(kind, rest)


def _flux_names(known: set[str]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {original: (name,) for original, name in _FLUX_OUTER.items()}
    for original, name, parts in (
        ("double_blocks", "transformer_blocks", _FLUX_DOUBLE),
        ("single_blocks", "single_transformer_blocks", _FLUX_SINGLE),
    ):
        indices = {one.split(".")[1] for one in known if one.startswith(f"{name}.")}
        for index in indices:
            for part, here in parts.items():
                found[f"{original}.{index}.{part}"] = tuple(f"{name}.{index}.{end}" for end in here)
    return {original: names for original, names in found.items() if known.issuperset(names)}
