# SPDX-License-Identifier: Apache-2.0
"""CLIP as a whole (Radford et al. 2021, arXiv:2103.00020): texts and images as vectors of one space.

The tower of images is a transformer over patches, which all attend to each other; the vector of an image is what its
first position, of no patch, has read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from jrl.models.diffusion.clip_config import ClipProjectedConfig, ClipTowerConfig, read_clip_projected_config
from jrl.models.diffusion.clip_entries import PREFIX, PROJECTION, clip_entries, layer_entries
from jrl.models.diffusion.clip_projection import ClipProjected
from jrl.models.diffusion.clip_text import LayerStack, stack_norm
from jrl.models.diffusion.config_values import COUNT, POSITIVE, UNREAD, Kind, one_of, read_values, require
from jrl.models.diffusion.entries import convolution, linear_entries, norm_entries
from jrl.models.diffusion.layers import linear
from jrl.models.families.base import Entry, table, vector
from jrl.models.layers import Table
from jrl.typing import Params, PRNGKey

MODEL_TYPE, CLASS_NAME = "clip", "CLIPModel"
TEXT, VISION = "text", "vision"
_WHAT = "CLIP"
_INIT_RANGE = 0.02
_PREFIX = "vision_model."
_TRAINING = ("attention_dropout", "dropout", "initializer_factor", "initializer_range")
_VISION_KINDS: Mapping[str, Kind] = {
    "hidden_size": COUNT,
    "intermediate_size": COUNT,
    "num_hidden_layers": COUNT,
    "num_attention_heads": COUNT,
    "image_size": COUNT,
    "patch_size": COUNT,
    "hidden_act": one_of("quick_gelu", "gelu"),
    "layer_norm_eps": POSITIVE,
}


@dataclass(frozen=True, kw_only=True)
class ClipVisionConfig(ClipTowerConfig):
    """The tower of images.

    Attributes:
      image_size: Pixels along an edge.
      patch_size: Pixels along the edge of a patch.
    """

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_attention_heads: int = 12
    image_size: int = 224
    patch_size: int = 32

    @property
    def num_positions(self) -> int:
        """Patches of an image, and the position of none."""
        return (self.image_size // self.patch_size) ** 2 + 1


@dataclass(frozen=True)
class ClipConfig:
    """Both towers.

    Attributes:
      text: The tower of texts, with the width of the common space.
      vision: The tower of images.
    """

    text: ClipProjectedConfig
    vision: ClipVisionConfig


def read_clip_model_config(values: Mapping[str, Any]) -> ClipConfig:
    """The model that a `config.json` of transformers' `CLIPModel` describes.

    Raises:
      ValueError: If a key is unknown, or asks for what is not implemented; the message names it.
    """
    kinds = {"projection_dim": COUNT}
    fixed = {"model_type": (MODEL_TYPE,)}
    # Old files hold each tower's config a second time, and the first value of a scale that has been learned since.
    silent = {
        *UNREAD,
        "initializer_factor",
        "logit_scale_init_value",
        *(f"{tower}_config{end}" for tower in (TEXT, VISION) for end in ("", "_dict")),
    }
    width = read_values(_WHAT, values, kinds, fixed, silent).get("projection_dim", 512)
    texts, images = (_tower(values, name) for name in (TEXT, VISION))
    vision_fixed = {"model_type": ("clip_vision_model",), "num_channels": (3,)}
    vision_silent = {*UNREAD, *_TRAINING, "projection_dim"}
    vision = read_values(f"{_WHAT} image tower", images, _VISION_KINDS, vision_fixed, vision_silent)
    text = replace(read_clip_projected_config(texts), projection_dim=width)
    return ClipConfig(text, ClipVisionConfig(**vision))


def _tower(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A tower's config, in which that of an old file's second copy rules."""
    found = dict(values.get(f"{name}_config") or {}) | dict(values.get(f"{name}_config_dict") or {})
    require(_WHAT, f"{name}_config", bool(found), "the config of that tower", values.get(f"{name}_config"))
    return found


class ClipVisionModule(nn.Module):
    """The tower of images, with its projection.

    Attributes:
      config: The architecture.
      projection_dim: Width of the common space.
      dtype: Of the computation; norms and softmax are float32 always.
    """

    config: ClipVisionConfig
    projection_dim: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, pixels: Float[Array, "B Y X 3"]) -> Float[Array, "B P"]:
        """Vectors of images, whose pixels are normalised as the tower was trained with."""
        config, width, size = self.config, self.config.hidden_size, self.config.patch_size
        init = nn.initializers.normal(_INIT_RANGE)
        kernel = self.param("patch_kernel", init, (size, size, 3, width), jnp.float32)
        begin = self.param("class_bias", init, (width,), jnp.float32)
        patches = jax.lax.conv_general_dilated(
            pixels.astype(self.dtype),
            kernel.astype(self.dtype),
            (size, size),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        rows = patches.shape[0]
        first = jnp.broadcast_to(begin.astype(self.dtype), (rows, 1, width))
        x = jnp.concatenate([first, patches.reshape(rows, -1, width)], axis=1)
        positions = Table(config.num_positions, width, _INIT_RANGE, None, name="position_embedding")
        x = x + positions(jnp.arange(config.num_positions)[None]).astype(self.dtype)
        x = stack_norm(config, self.dtype, "pre_layrnorm")(x)
        _, x = LayerStack(config, self.dtype, is_causal=False, name="encoder")(x)
        x = stack_norm(config, self.dtype, "post_layernorm")(x[:, 0])
        project = linear(width, self.projection_dim, self.dtype, use_bias=False, name="visual_projection")
        return project(x)


@dataclass(frozen=True)
class ClipImages:
    """The tower of images alone, without weights.

    Attributes:
      config: The architecture of both towers, as the folder describes it.
    """

    config: ClipConfig

    def init(self, key: PRNGKey) -> dict[str, Any]:
        """Fresh float32 parameters: {"vision": ...}."""
        size = self.config.vision.image_size
        init = jax.jit(self._module(jnp.float32).init)
        return {VISION: dict(init(key, jnp.zeros((1, size, size, 3)))["params"])}

    def encode_image(
        self, params: Params, pixels: Float[Array, "B Y X 3"], *, dtype: Any
    ) -> Float[Array, "B P"]:
        """Vectors of images, not normalised.

        Args:
          params: Of this tower, or of both.
          pixels: Of `image_size`, less their mean, over their deviation.
          dtype: Of the computation.
        Raises:
          ValueError: If images have another size.
        """
        size = self.config.vision.image_size
        if pixels.shape[1:] != (size, size, 3):
            raise ValueError(f"`pixels` must have shape (rows, {size}, {size}, 3), got {pixels.shape}.")
        encoded: Any = self._module(dtype).apply({"params": params[VISION]}, pixels)
        return encoded

    def _module(self, dtype: Any) -> ClipVisionModule:
        return ClipVisionModule(self.config.vision, self.config.text.projection_dim, dtype)

    def entries(self) -> list[Entry]:
        """Every tensor of this tower."""
        entries = _vision_entries(self.config.vision, self.config.text.projection_dim)
        return [_within(VISION, entry) for entry in entries]

    def stored_config(self) -> dict[str, Any]:
        """Contents of the config.json of both towers, as transformers reads it."""
        text, vision = asdict(self.config.text), asdict(self.config.vision)
        return {
            "architectures": [CLASS_NAME],
            "model_type": MODEL_TYPE,
            "projection_dim": self.config.text.projection_dim,
            "text_config": {"model_type": "clip_text_model", **text},
            "vision_config": {"model_type": "clip_vision_model", "num_channels": 3, **vision},
        }


@dataclass(frozen=True)
class Clip(ClipImages):
    """Both towers, without weights."""

    def init(self, key: PRNGKey) -> dict[str, Any]:
        """Fresh float32 parameters: {"text": ..., "vision": ...}."""
        text_key, vision_key = jax.random.split(key)
        return {TEXT: self._text.init(text_key), **super().init(vision_key)}

    def encode_text(self, params: Params, tokens: Int[Array, "B Q"], *, dtype: Any) -> Float[Array, "B P"]:
        """Vectors of texts, not normalised.

        Args:
          params: Of both towers.
          tokens: Ids, each row with an end.
          dtype: Of the computation.
        """
        return self._text.encode(params[TEXT], tokens, dtype=dtype).pooled

    @property
    def _text(self) -> ClipProjected:
        return ClipProjected(self.config.text)

    def entries(self) -> list[Entry]:
        """Every tensor of its file but the scale of logits, which a cosine does not need."""
        texts = (_within(TEXT, entry) for entry in clip_entries(self.config.text))
        return [*texts, *super().entries()]


def is_ignored(name: str) -> bool:
    """True for the scale of logits, and for tensors that only count positions."""
    return name == "logit_scale" or name.endswith(".embeddings.position_ids")


def is_ignored_by_images(name: str) -> bool:
    """True for what the tower of images does not read: the same, and the tower of texts."""
    return is_ignored(name) or name.startswith((PREFIX, PROJECTION))


def _within(tower: str, entry: Entry) -> Entry:
    """The entry among the parameters of both towers."""
    return replace(entry, paths=tuple(f"{tower}/{path}" for path in entry.paths))


def _vision_entries(config: ClipVisionConfig, projection_dim: int) -> list[Entry]:
    width, size = config.hidden_size, config.patch_size
    embeddings = "embeddings"
    found = [
        Entry(f"{embeddings}.class_embedding", ("class_bias",), vector(), (width,)),
        Entry(
            f"{embeddings}.patch_embedding.weight", ("patch_kernel",), convolution(), (width, 3, size, size)
        ),
        Entry(
            f"{embeddings}.position_embedding.weight",
            ("position_embedding/embedding",),
            table(),
            (config.num_positions, width),
        ),
        *norm_entries("pre_layrnorm", width),
        *layer_entries(config),
        *norm_entries("post_layernorm", width),
    ]
    named = [replace(entry, name=_PREFIX + entry.name) for entry in found]
    return [*named, *linear_entries("visual_projection", width, projection_dim, bias=False)]
