# SPDX-License-Identifier: Apache-2.0
"""Description of a CLIP text encoder, read from the `config.json` of its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from jrl.models.diffusion.config_values import (
    COUNT,
    POSITIVE,
    UNREAD,
    WHOLE,
    Kind,
    one_of,
    read_values,
    require,
)

MODEL_TYPE, CLASS_NAME = "clip_text_model", "CLIPTextModel"
PROJECTED_CLASS = "CLIPTextModelWithProjection"
_WHAT = "CLIP text encoder"
_KINDS: Mapping[str, Kind] = {
    "vocab_size": COUNT,
    "hidden_size": COUNT,
    "intermediate_size": COUNT,
    "num_hidden_layers": COUNT,
    "num_attention_heads": COUNT,
    "max_position_embeddings": COUNT,
    "hidden_act": one_of("quick_gelu", "gelu"),
    "layer_norm_eps": POSITIVE,
}
_FIXED: Mapping[str, tuple[Any, ...]] = {"model_type": (MODEL_TYPE,)}
# Of training, and of a pooled output, which nobody reads here.
_SILENT = UNREAD | {"attention_dropout", "dropout", "initializer_factor", "initializer_range"}
_POOLED = ("projection_dim", "eos_token_id")


@dataclass(frozen=True, kw_only=True)
class ClipTowerConfig:
    """Layers of either encoder of CLIP. Names and defaults are transformers'. Hashable.

    Attributes:
      hidden_size: D.
      intermediate_size: Inner width of the feed-forward layers.
      num_hidden_layers: Of its blocks. Stable Diffusion 2 reads the last but one of 24: its folder holds 23.
      num_attention_heads: Divides D.
      hidden_act: "quick_gelu", x·σ(1.702 x), or "gelu", the exact one.
      layer_norm_eps: Of all norms.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int = 12
    num_attention_heads: int
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        """Raises ValueError where the heads do not divide the width."""
        width, heads = self.hidden_size, self.num_attention_heads
        require(
            _WHAT, "num_attention_heads", width % heads == 0, f"a divisor of `hidden_size` {width}", heads
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class ClipTextConfig(ClipTowerConfig):
    """A text encoder of CLIP.

    Attributes:
      vocab_size: Real entries of the vocabulary.
      max_position_embeddings: Longest row.
    """

    vocab_size: int = 49408
    hidden_size: int = 512
    intermediate_size: int = 2048
    num_attention_heads: int = 8
    max_position_embeddings: int = 77

    def __repr__(self) -> str:
        # By this a resumed run knows its model: the order is that of the first version.
        values = {name: vars(self)[name] for name in (*_KINDS, *vars(self))}
        return (
            f"{type(self).__qualname__}({', '.join(f'{name}={value!r}' for name, value in values.items())})"
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class ClipProjectedConfig(ClipTextConfig):
    """A text encoder of CLIP that also makes one vector of the whole text. Names and defaults are transformers'.

    Attributes:
      projection_dim: Width of that vector.
      eos_token_id: Id of the token whose state it is made of, the first of its kind. At 2, which old files say, it
        is the token with the largest id.
    """

    projection_dim: int = 512
    eos_token_id: int = 49407


@dataclass(frozen=True, kw_only=True, repr=False)
class ClipPooledConfig(ClipTextConfig):
    """A text encoder of CLIP of which the state at the end of a text is read. Names and defaults are transformers'.

    Attributes:
      eos_token_id: As in `ClipProjectedConfig`.
    """

    eos_token_id: int = 49407


def read_clip_config(values: Mapping[str, Any]) -> ClipTextConfig:
    """The encoder that a `config.json` describes; keys that are missing have transformers' defaults.

    Raises:
      ValueError: If a key is unknown, or asks for what is not implemented; the message names it.
    """
    return ClipTextConfig(**read_values(_WHAT, values, _KINDS, _FIXED, {*_SILENT, *_POOLED}))


def read_clip_projected_config(values: Mapping[str, Any]) -> ClipProjectedConfig:
    """The encoder of a `CLIPTextModelWithProjection`'s `config.json`; for the rest as `read_clip_config`."""
    kinds = {**_KINDS, "projection_dim": COUNT, "eos_token_id": WHOLE}
    return ClipProjectedConfig(**read_values(_WHAT, values, kinds, _FIXED, _SILENT))


def read_clip_pooled_config(values: Mapping[str, Any]) -> ClipPooledConfig:
    """The encoder of a `CLIPTextModel`'s `config.json`, with the token that ends a text; else as `read_clip_config`."""
    kinds = {**_KINDS, "eos_token_id": WHOLE}
    return ClipPooledConfig(**read_values(_WHAT, values, kinds, _FIXED, {*_SILENT, "projection_dim"}))


def stored_clip_config(config: ClipTextConfig, dtype: str = "float32") -> dict[str, Any]:
    """The `config.json` from which transformers builds the same encoder."""
    name = PROJECTED_CLASS if isinstance(config, ClipProjectedConfig) else CLASS_NAME
    return {"architectures": [name], "model_type": MODEL_TYPE, "dtype": dtype, **asdict(config)}
