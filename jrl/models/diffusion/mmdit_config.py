# SPDX-License-Identifier: Apache-2.0
"""Description of a multimodal diffusion transformer, read from the `config.json` of a diffusers folder.

Every key is a field of `MMDiTConfig`; unknown keys are refused, and none is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from jrl.models.diffusion.config_values import COUNT, Kind, one_of, read_values, require
from jrl.models.diffusion.joint_block import Heads

WHAT = "MMDiT"
CLASS_NAME = "SD3Transformer2DModel"


def _are_layers(value: Any) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in value
    )


_KINDS: Mapping[str, Kind] = {
    "sample_size": COUNT,
    "patch_size": COUNT,
    "in_channels": COUNT,
    "num_layers": COUNT,
    "attention_head_dim": COUNT,
    "num_attention_heads": COUNT,
    "joint_attention_dim": COUNT,
    "caption_projection_dim": COUNT,
    "pooled_projection_dim": COUNT,
    "out_channels": Kind(f"{COUNT.says}, or null", lambda value: value is None or COUNT.holds(value)),
    "pos_embed_max_size": COUNT,
    "dual_attention_layers": Kind("a list of numbers of layers, from 0", _are_layers),
    "qk_norm": one_of(None, "rms_norm"),
}


@dataclass(frozen=True)
class MMDiTConfig:
    """A transformer over patches of an image and a prompt's tokens. Names and defaults are diffusers'. Hashable.

    Attributes:
      sample_size: Latents along an edge that it was trained on.
      patch_size: Latents along the edge of a patch, which is one token.
      in_channels: Of what it reads.
      num_layers: Blocks.
      attention_head_dim: Width of a head.
      num_attention_heads: N; the residual streams have N times that width.
      joint_attention_dim: Width of a prompt's embedding.
      caption_projection_dim: Of the prompt's stream; the same as the image's.
      pooled_projection_dim: Width of the pooled prompt, which is added to the timestep.
      out_channels: Of what it makes; None: `in_channels`.
      pos_embed_max_size: Patches along an edge of the table of positions, whose middle an image takes.
      dual_attention_layers: Blocks with a second attention, of the image to itself (Stable Diffusion 3.5 medium).
      qk_norm: "rms_norm" of queries and keys in each head, or None.
    """

    sample_size: int = 128
    patch_size: int = 2
    in_channels: int = 16
    num_layers: int = 18
    attention_head_dim: int = 64
    num_attention_heads: int = 18
    joint_attention_dim: int = 4096
    caption_projection_dim: int = 1152
    pooled_projection_dim: int = 2048
    out_channels: int | None = 16
    pos_embed_max_size: int = 96
    dual_attention_layers: tuple[int, ...] = ()
    qk_norm: str | None = None

    def __post_init__(self) -> None:
        """Raises ValueError where widths and layers do not fit each other."""
        for name, holds, expected in (
            (
                "caption_projection_dim",
                self.caption_projection_dim == self.width,
                f"`num_attention_heads` * `attention_head_dim` = {self.width}: both streams attend together",
            ),
            (
                "num_attention_heads",
                self.width % 4 == 0,
                "such that the width is a multiple of 4: sines and cosines",
            ),
            (
                "pooled_projection_dim",
                self.pooled_projection_dim <= self.joint_attention_dim,
                f"at most `joint_attention_dim` = {self.joint_attention_dim} (else not implemented)",
            ),
            (
                "dual_attention_layers",
                all(layer < self.num_layers for layer in self.dual_attention_layers),
                f"numbers of layers below {self.num_layers}",
            ),
        ):
            require(WHAT, name, holds, expected, vars(self)[name])

    @property
    def width(self) -> int:
        """Width of the residual streams."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def heads(self) -> Heads:
        """Shape of every attention."""
        return Heads(self.num_attention_heads, self.attention_head_dim, self.qk_norm is not None)

    @property
    def channels_made(self) -> int:
        """`out_channels`, with None resolved."""
        return self.in_channels if self.out_channels is None else self.out_channels


def read_mmdit_config(values: Mapping[str, Any]) -> MMDiTConfig:
    """The transformer that a `config.json` describes; keys that are missing have diffusers' defaults.

    Args:
      values: The file's. Keys that begin with `_` are notes of the writer's.
    Raises:
      ValueError: If a key is unknown, or asks for what is not implemented; the message names it.
    """
    return MMDiTConfig(**read_values(WHAT, values, _KINDS, {}))


def stored_mmdit_config(config: MMDiTConfig) -> dict[str, Any]:
    """The `config.json` from which diffusers builds the same network, with all keys."""
    own = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(config).items()}
    return {"_class_name": CLASS_NAME, **own}
