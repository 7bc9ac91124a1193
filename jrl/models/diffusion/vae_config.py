# SPDX-License-Identifier: Apache-2.0
"""Description of an autoencoder of images, read from the `config.json` of a diffusers folder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from jrl.models.config import LATER, Described
from jrl.models.diffusion.config_values import (
    COUNT,
    COUNTS,
    FLAG,
    POSITIVE,
    SIZE,
    Kind,
    all_of,
    read_values,
    require,
)

CLASS_NAME = "AutoencoderKL"
_WHAT = "VAE"
_DOWN, _UP = "DownEncoderBlock2D", "UpDecoderBlock2D"


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_KINDS: Mapping[str, Kind] = {
    "in_channels": COUNT,
    "out_channels": COUNT,
    "down_block_types": all_of(_DOWN),
    "up_block_types": all_of(_UP),
    "block_out_channels": COUNTS,
    "layers_per_block": COUNT,
    "latent_channels": COUNT,
    "norm_num_groups": COUNT,
    "sample_size": SIZE,
    "scaling_factor": POSITIVE,
    "shift_factor": Kind("a number, or null", lambda value: value is None or _is_finite(value)),
    "force_upcast": FLAG,
    "use_quant_conv": FLAG,
    "use_post_quant_conv": FLAG,
    "mid_block_add_attention": FLAG,
}
# Keys with one supported value, the first; others that mean the same follow it.
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "act_fn": ("silu", "swish"),
    "latents_mean": (None,),
    "latents_std": (None,),
}


@dataclass(frozen=True, repr=False)
class VAEConfig(Described):
    """An autoencoder whose code is a small image. Names and defaults are diffusers'. Hashable.

    Attributes:
      in_channels: Of the images it reads.
      out_channels: Of the images it makes.
      down_block_types: Of each level of the encoder.
      up_block_types: Of each level of the decoder.
      block_out_channels: Width of each level, the finest first.
      layers_per_block: Residual blocks of a level of the encoder; one more in the decoder.
      latent_channels: Of the code.
      norm_num_groups: Of all group norms.
      sample_size: Pixels along an edge of the images it was trained on; says nothing here.
      scaling_factor: The denoiser's latents are the code, less the shift, times this.
      shift_factor: That shift; None: 0.
      force_upcast: float16 overflows in it. Nothing is decoded in float16 in any case.
      use_quant_conv: The encoder ends with a 1 × 1 convolution.
      use_post_quant_conv: The decoder begins with one.
      mid_block_add_attention: Both attend over all places at their coarsest level.
    """

    in_channels: int = 3
    out_channels: int = 3
    down_block_types: tuple[str, ...] = (_DOWN,)
    up_block_types: tuple[str, ...] = (_UP,)
    block_out_channels: tuple[int, ...] = (64,)
    layers_per_block: int = 1
    latent_channels: int = 4
    norm_num_groups: int = 32
    sample_size: int | tuple[int, int] = 32
    scaling_factor: float = 0.18215
    shift_factor: float | None = field(default=None, metadata=LATER)
    force_upcast: bool = True
    use_quant_conv: bool = True
    use_post_quant_conv: bool = True
    mid_block_add_attention: bool = True

    def __post_init__(self) -> None:
        """Raises ValueError where levels, widths and groups do not fit each other."""
        widths = self.block_out_channels
        for key, types in (
            ("down_block_types", self.down_block_types),
            ("up_block_types", self.up_block_types),
        ):
            require(_WHAT, key, len(types) == len(widths), f"{len(widths)} names, one for each width", types)
        fits = all(width % self.norm_num_groups == 0 for width in widths)
        require(_WHAT, "block_out_channels", fits, f"multiples of {self.norm_num_groups} groups", widths)

    @property
    def shift(self) -> float:
        """`shift_factor`, with None resolved."""
        return self.shift_factor or 0.0

    @property
    def factor(self) -> int:
        """Pixels along the edge of one latent."""
        return 2 ** (len(self.block_out_channels) - 1)

    def down_levels(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Channels that each residual block of the encoder reads and makes, by level, the finest first."""
        widths, count = self.block_out_channels, self.layers_per_block
        return _levels((widths[0], *widths), count)

    def up_levels(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Channels that each residual block of the decoder reads and makes, by level, the coarsest first."""
        widths, count = self.block_out_channels[::-1], self.layers_per_block + 1
        return _levels((widths[0], *widths), count)


def _levels(widths: tuple[int, ...], count: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    return tuple(((before, width), *((width, width),) * (count - 1)) for before, width in pairwise(widths))


def read_vae_config(values: Mapping[str, Any]) -> VAEConfig:
    """The autoencoder that a `config.json` describes; keys that are missing have diffusers' defaults.

    Args:
      values: The file's. Keys that begin with `_` are notes of the writer's.
    Raises:
      ValueError: If a key is unknown, or asks for what is not implemented; the message names it.
    """
    return VAEConfig(**read_values(_WHAT, values, _KINDS, _FIXED))


def stored_vae_config(config: VAEConfig) -> dict[str, Any]:
    """The `config.json` from which diffusers builds the same network, with all keys."""
    own = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(config).items()}
    return {"_class_name": CLASS_NAME, **own, **{key: values[0] for key, values in _FIXED.items()}}
