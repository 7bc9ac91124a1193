# SPDX-License-Identifier: Apache-2.0
"""Description of a U-Net, read from the `config.json` of a diffusers folder.

Every key is either a field of `UNetConfig` or has to have the one value that is implemented; no key is ignored.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from jrl.models.config import LATER, Described
from jrl.models.diffusion.config_values import (
    COUNT,
    COUNTS,
    FLAG,
    POSITIVE,
    SIZE,
    Kind,
    one_of,
    read_values,
    require,
)

WHAT = "U-Net"
DOWN_BLOCKS: Mapping[str, bool] = {"CrossAttnDownBlock2D": True, "DownBlock2D": False}
UP_BLOCKS: Mapping[str, bool] = {"CrossAttnUpBlock2D": True, "UpBlock2D": False}
"""Kinds of a level, and whether it attends."""
CLASS_NAME = "UNet2DConditionModel"
TEXT_TIME = "text_time"
SIZE_IDS = 6
"""Numbers that a network with `addition_embed_type` reads of an image: two edges each of three sizes."""

# Keys with one supported value, the first; others that mean the same follow it.
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "mid_block_type": ("UNetMidBlock2DCrossAttn",),
    "only_cross_attention": (False,),
    "downsample_padding": (1,),
    "act_fn": ("silu", "swish"),
    "num_attention_heads": (None,),
    "dual_cross_attention": (False, None),
    "resnet_time_scale_shift": ("default",),
    "resnet_skip_time_act": (False, None),
    "resnet_out_scale_factor": (1.0,),
    "time_embedding_type": ("positional",),
    "time_embedding_dim": (None,),
    "time_embedding_act_fn": (None,),
    "timestep_post_act": (None,),
    "time_cond_proj_dim": (None,),
    "conv_in_kernel": (3,),
    "conv_out_kernel": (3,),
    "class_embed_type": (None,),
    "num_class_embeds": (None,),
    "class_embeddings_concat": (False, None),
    "addition_embed_type_num_heads": (64,),
    "encoder_hid_dim": (None,),
    "encoder_hid_dim_type": (None,),
    "reverse_transformer_layers_per_block": (None,),
    "mid_block_only_cross_attention": (None, False),
    "cross_attention_norm": (None,),
    "attention_type": ("default",),
}


_NAMES = Kind(
    "a list of names of blocks",
    lambda value: isinstance(value, tuple) and bool(value) and all(isinstance(name, str) for name in value),
)
_SAME_COUNT = Kind(
    f"{COUNT.says}, or the same one for each level",
    lambda value: COUNT.holds(value) or (COUNTS.holds(value) and len(set(value)) == 1),
)
_BY_LEVEL = Kind(
    f"{COUNT.says}, or one for each level", lambda value: COUNT.holds(value) or COUNTS.holds(value)
)
_COUNT_OR_NONE = Kind(f"{COUNT.says}, or null", lambda value: value is None or COUNT.holds(value))
_KINDS: Mapping[str, Kind] = {
    "sample_size": Kind(f"{SIZE.says}, or null", lambda value: value is None or SIZE.holds(value)),
    "in_channels": COUNT,
    "out_channels": COUNT,
    "center_input_sample": FLAG,
    "flip_sin_to_cos": FLAG,
    "freq_shift": Kind("0 or a positive number", lambda value: value == 0 or POSITIVE.holds(value)),
    "down_block_types": _NAMES,
    "up_block_types": _NAMES,
    "block_out_channels": COUNTS,
    "layers_per_block": _SAME_COUNT,
    "mid_block_scale_factor": POSITIVE,
    "norm_num_groups": COUNT,
    "norm_eps": POSITIVE,
    "cross_attention_dim": _SAME_COUNT,
    "transformer_layers_per_block": _BY_LEVEL,
    "attention_head_dim": _BY_LEVEL,
    "use_linear_projection": FLAG,
    "upcast_attention": FLAG,
    "addition_embed_type": one_of(None, TEXT_TIME),
    "addition_time_embed_dim": _COUNT_OR_NONE,
    "projection_class_embeddings_input_dim": _COUNT_OR_NONE,
}
# Keys whose list is read as one number where all of its entries are the same.
_COLLAPSED = ("layers_per_block", "cross_attention_dim", "transformer_layers_per_block")


@dataclass(frozen=True)
class Level:
    """A level of the way down or up.

    Attributes:
      resnets: Channels that each residual block reads and makes.
      num_heads: Of the attention behind each of them; None: there is none.
      num_layers: Transformer blocks of each attention.
      resamples: The level ends with a change of size.
    """

    resnets: tuple[tuple[int, int], ...]
    num_heads: int | None
    num_layers: int
    resamples: bool


@dataclass(frozen=True, repr=False)
class UNetConfig(Described):
    """A U-Net with attention to a prompt. Names and defaults are diffusers'. Hashable.

    Attributes:
      sample_size: Latents along an edge, or (height, width), that it was trained on; None: unknown.
      in_channels: Of what it reads.
      out_channels: Of what it makes.
      center_input_sample: Reads 2x − 1 in place of x.
      flip_sin_to_cos: The timestep's cosines come before its sines.
      freq_shift: Of the timestep's frequencies, see `sinusoids`.
      down_block_types: Of each level on the way down, the finest first.
      up_block_types: Of each level on the way up, the coarsest first.
      block_out_channels: Width of each level, the finest first.
      layers_per_block: Residual blocks of a level on the way down; one more on the way up.
      mid_block_scale_factor: Divides the sum at the end of the residual blocks in the middle.
      norm_num_groups: Of all group norms.
      norm_eps: Of the group norms in residual blocks and at the end.
      cross_attention_dim: Width of a prompt's embedding.
      transformer_layers_per_block: Transformer blocks behind a residual block, at each level, the finest first. One
        number stands for all levels.
      attention_head_dim: *Number of heads* at each level, the finest first, whatever its name says: the name is a slip
        that checkpoints have kept. One number stands for all levels.
      use_linear_projection: Linear maps around the transformer blocks are stored as such, not as 1 × 1 convolutions.
      upcast_attention: Scores of attention are float32. They are so in any case.
      addition_embed_type: "text_time" adds the pooled prompt and the sizes of the image to the embedded timestep; None:
        nothing does.
      addition_time_embed_dim: Width of the sinusoids of each of the sizes.
      projection_class_embeddings_input_dim: Width of the pooled prompt and of all sinusoids together.
    """

    sample_size: int | tuple[int, int] | None = None
    in_channels: int = 4
    out_channels: int = 4
    center_input_sample: bool = False
    flip_sin_to_cos: bool = True
    freq_shift: float = 0
    down_block_types: tuple[str, ...] = (*("CrossAttnDownBlock2D",) * 3, "DownBlock2D")
    up_block_types: tuple[str, ...] = ("UpBlock2D", *("CrossAttnUpBlock2D",) * 3)
    block_out_channels: tuple[int, ...] = (320, 640, 1280, 1280)
    layers_per_block: int = 2
    mid_block_scale_factor: float = 1
    norm_num_groups: int = 32
    norm_eps: float = 1e-5
    cross_attention_dim: int = 1280
    transformer_layers_per_block: int | tuple[int, ...] = 1
    attention_head_dim: int | tuple[int, ...] = 8
    use_linear_projection: bool = False
    upcast_attention: bool = False
    addition_embed_type: str | None = field(default=None, metadata=LATER)
    addition_time_embed_dim: int | None = field(default=None, metadata=LATER)
    projection_class_embeddings_input_dim: int | None = field(default=None, metadata=LATER)

    def __post_init__(self) -> None:
        """Raises ValueError where levels, widths, groups and heads do not fit each other."""
        widths = self.block_out_channels
        for name, kinds, known in (
            ("down_block_types", self.down_block_types, DOWN_BLOCKS),
            ("up_block_types", self.up_block_types, UP_BLOCKS),
        ):
            bad = [kind for kind in kinds if kind not in known]
            require(WHAT, name, not bad, f"made of {' and '.join(known)}", kinds)
            require(WHAT, name, len(kinds) == len(widths), f"{len(widths)} names, one for each width", kinds)
        heads, layers = self.attention_head_dim, self.transformer_layers_per_block
        for name, given, found in (
            ("attention_head_dim", heads, self.heads),
            ("transformer_layers_per_block", layers, self.layers),
        ):
            fits = len(found) == len(widths)
            require(WHAT, name, fits, f"one number or {len(widths)}, one for each width", given)
        bad_widths = [width for width in widths if width % self.norm_num_groups]
        require(
            WHAT, "block_out_channels", not bad_widths, f"multiples of {self.norm_num_groups} groups", widths
        )
        require(WHAT, "block_out_channels", widths[0] % 2 == 0, "even at first: sines and cosines", widths)
        below = f"below {widths[0] // 2}, half the first width"
        require(WHAT, "freq_shift", self.freq_shift < widths[0] // 2, below, self.freq_shift)
        for index, (width, count) in enumerate(zip(widths, self.heads, strict=True)):
            divides = not self._attends(index) or width % count == 0
            require(WHAT, "attention_head_dim", divides, f"divisors of the widths {widths}", heads)
        self._check_addition()

    def _check_addition(self) -> None:
        """Raises ValueError where the widths of what is added to the timestep are no such widths."""
        added, size = self.projection_class_embeddings_input_dim, self.addition_time_embed_dim
        if self.addition_embed_type is None:
            for name, value in (
                ("projection_class_embeddings_input_dim", added),
                ("addition_time_embed_dim", size),
            ):
                require(WHAT, name, value is None, "null where `addition_embed_type` is", value)
            return
        even = f"even with `addition_embed_type` {TEXT_TIME!r}: sines and cosines"
        require(WHAT, "addition_time_embed_dim", size is not None and size % 2 == 0, even, size)
        assert size is not None
        sizes, prompt = SIZE_IDS * size, self.cross_attention_dim
        fits = added is not None and sizes < added <= sizes + prompt
        expected = f"above {sizes}, {SIZE_IDS} sizes' sinusoids, by at most `cross_attention_dim` = {prompt}"
        require(WHAT, "projection_class_embeddings_input_dim", fits, expected, added)

    @property
    def heads(self) -> tuple[int, ...]:
        """Number of heads at each level, the finest first."""
        return self._by_level(self.attention_head_dim)

    @property
    def layers(self) -> tuple[int, ...]:
        """Transformer blocks behind a residual block at each level, the finest first."""
        return self._by_level(self.transformer_layers_per_block)

    @property
    def pooled_width(self) -> int:
        """Width of the pooled prompt; 0: none is read."""
        if self.addition_time_embed_dim is None or self.projection_class_embeddings_input_dim is None:
            return 0
        return self.projection_class_embeddings_input_dim - SIZE_IDS * self.addition_time_embed_dim

    def _by_level(self, value: int | tuple[int, ...]) -> tuple[int, ...]:
        return value if isinstance(value, tuple) else (value,) * len(self.block_out_channels)

    @property
    def time_width(self) -> int:
        """Width of the embedded timestep."""
        return 4 * self.block_out_channels[0]

    def down_levels(self) -> tuple[Level, ...]:
        """The way down, the finest level first."""
        widths, levels = self.block_out_channels, []
        for index, kind in enumerate(self.down_block_types):
            width = widths[index]
            before = widths[max(index - 1, 0)]
            resnets = ((before, width), *((width, width),) * (self.layers_per_block - 1))
            num_heads = self.heads[index] if DOWN_BLOCKS[kind] else None
            levels.append(Level(resnets, num_heads, self.layers[index], resamples=index < len(widths) - 1))
        return tuple(levels)

    def mid_level(self) -> Level:
        """The blocks in the middle; the second of them has no attention behind it."""
        width = self.block_out_channels[-1]
        return Level(((width, width),) * 2, self.heads[-1], self.layers[-1], resamples=False)

    def up_levels(self) -> tuple[Level, ...]:
        """The way up, the coarsest level first: each residual block reads a skip beside what comes from below."""
        widths, levels = self.block_out_channels[::-1], []
        # What the levels above will ask back, the last pushed first.
        skips = [self.block_out_channels[0]]
        for level in self.down_levels():
            skips += [size_out for _, size_out in level.resnets]
            skips += skips[-1:] * level.resamples
        below = widths[0]
        for index, kind in enumerate(self.up_block_types):
            resnets = []
            for _ in range(self.layers_per_block + 1):
                resnets.append((below + skips.pop(), widths[index]))
                below = widths[index]
            num_heads = self.heads[::-1][index] if UP_BLOCKS[kind] else None
            num_layers = self.layers[::-1][index]
            levels.append(Level(tuple(resnets), num_heads, num_layers, resamples=index < len(widths) - 1))
        return tuple(levels)

    def _attends(self, index: int) -> bool:
        last = len(self.block_out_channels) - 1
        return (
            index == last
            or DOWN_BLOCKS[self.down_block_types[index]]
            or UP_BLOCKS[self.up_block_types[-1 - index]]
        )


def read_unet_config(values: Mapping[str, Any]) -> UNetConfig:
    """The U-Net that a `config.json` describes; keys that are missing have diffusers' defaults.

    Args:
      values: The file's. Keys that begin with `_` are notes of the writer's.
    Raises:
      ValueError: If a key is unknown, or asks for what is not implemented; the message names it.
    """
    values = dict(values)
    if values.pop("dropout", 0):
        warnings.warn("U-Net config: `dropout` is not applied: RL trains without it.", stacklevel=2)
    per_level = values.get("only_cross_attention")
    if isinstance(per_level, list | tuple) and not any(per_level):
        values["only_cross_attention"] = False
    found = read_values(WHAT, values, _KINDS, _FIXED)
    count = len(found.get("block_out_channels", UNetConfig.block_out_channels))
    for key in [key for key in _COLLAPSED if isinstance(found.get(key), tuple)]:
        require(WHAT, key, len(found[key]) == count, f"one number or {count}, one for each width", found[key])
        if len(set(found[key])) == 1:
            found[key] = found[key][0]
    return UNetConfig(**found)


def stored_unet_config(config: UNetConfig) -> dict[str, Any]:
    """The `config.json` from which diffusers builds the same network, with all keys."""
    own = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(config).items()}
    return {
        "_class_name": CLASS_NAME,
        **own,
        **{key: values[0] for key, values in _FIXED.items()},
        "dropout": 0.0,
    }
