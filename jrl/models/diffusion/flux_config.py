# SPDX-License-Identifier: Apache-2.0
"""Description of the transformer of FLUX.1, read from the `config.json` of a diffusers folder.

Every key is a field of `FluxConfig` or has the one value that is implemented; unknown keys are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from jrl.models.diffusion.config_values import COUNT, COUNTS, FLAG, Kind, read_values, require
from jrl.models.diffusion.joint_block import Heads

WHAT = "Flux transformer"
CLASS_NAME = "FluxTransformer2DModel"
PACKED_EDGE = 2
"""Latents along the edge of a patch: the pipeline packs them, before the network sees them."""
_KINDS: Mapping[str, Kind] = {
    "in_channels": COUNT,
    "out_channels": Kind(f"{COUNT.says}, or null", lambda value: value is None or COUNT.holds(value)),
    "num_layers": COUNT,
    "num_single_layers": COUNT,
    "attention_head_dim": COUNT,
    "num_attention_heads": COUNT,
    "joint_attention_dim": COUNT,
    "pooled_projection_dim": COUNT,
    "guidance_embeds": FLAG,
    "axes_dims_rope": COUNTS,
}
_FIXED: Mapping[str, tuple[Any, ...]] = {"patch_size": (1,)}


@dataclass(frozen=True)
class FluxConfig:
    """A transformer over packed latents and a prompt's tokens. Names and defaults are diffusers'. Hashable.

    Attributes:
      in_channels: Of a patch: four latents' channels.
      out_channels: Of what it makes of a patch; None: `in_channels`.
      num_layers: Blocks over two streams.
      num_single_layers: Blocks over both streams as one, behind them.
      attention_head_dim: Width of a head.
      num_attention_heads: N; the residual streams have N times that width.
      joint_attention_dim: Width of a prompt's embedding.
      pooled_projection_dim: Width of the pooled prompt, which is added to the timestep.
      guidance_embeds: The network is told the guidance scale (FLUX.1-dev); false: it knows of none (schnell).
      axes_dims_rope: Dimensions of a head that are turned by a zero, by the row and by the column of a patch.
    """

    in_channels: int = 64
    out_channels: int | None = None
    num_layers: int = 19
    num_single_layers: int = 38
    attention_head_dim: int = 128
    num_attention_heads: int = 24
    joint_attention_dim: int = 4096
    pooled_projection_dim: int = 768
    guidance_embeds: bool = False
    axes_dims_rope: tuple[int, ...] = (16, 56, 56)

    def __post_init__(self) -> None:
        """Raises ValueError where widths do not fit each other."""
        dims, square = self.axes_dims_rope, PACKED_EDGE**2
        for name, holds, expected in (
            ("in_channels", self.in_channels % square == 0, f"a multiple of {square}: two by two latents"),
            (
                "out_channels",
                self.channels_made == self.in_channels,
                f"{self.in_channels}, the `in_channels`, or null (else not implemented)",
            ),
            (
                "pooled_projection_dim",
                self.pooled_projection_dim <= self.joint_attention_dim,
                f"at most `joint_attention_dim` = {self.joint_attention_dim} (else not implemented)",
            ),
            (
                "axes_dims_rope",
                len(dims) == 3 and sum(dims) == self.attention_head_dim and all(dim % 2 == 0 for dim in dims),
                f"three even numbers, {self.attention_head_dim} in sum as `attention_head_dim`",
            ),
        ):
            require(WHAT, name, holds, expected, vars(self)[name])

    @property
    def heads(self) -> Heads:
        """Shape of every attention."""
        return Heads(self.num_attention_heads, self.attention_head_dim, is_normed=True)

    @property
    def width(self) -> int:
        """Width of the residual streams."""
        return self.heads.total

    @property
    def channels_made(self) -> int:
        """`out_channels`, with None resolved."""
        return self.in_channels if self.out_channels is None else self.out_channels

    @property
    def latent_channels(self) -> int:
        """C of the latents, before they are packed."""
        return self.in_channels // PACKED_EDGE**2


def read_flux_config(values: Mapping[str, Any]) -> FluxConfig:
    """The transformer that a `config.json` describes; keys that are missing have diffusers' defaults.

    Args:
      values: The file's. Keys that begin with `_` are notes of the writer's.
    Raises:
      ValueError: If a key is unknown, or asks for what is not implemented; the message names it.
    """
    return FluxConfig(**read_values(WHAT, values, _KINDS, _FIXED))


def stored_flux_config(config: FluxConfig) -> dict[str, Any]:
    """The `config.json` from which diffusers builds the same network, with all keys."""
    own = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(config).items()}
    return {"_class_name": CLASS_NAME, **own, **{key: values[0] for key, values in _FIXED.items()}}
