# SPDX-License-Identifier: Apache-2.0
"""The parts of a toy text-to-image model: pixels rearranged as latents, a table of words, and a small U-Net.

It is a `DiffusionModel` like Stable Diffusion, so samplers, learners and trainers do not know the difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jrl.models.diffusion import DiffusionModel, UNet, UNetConfig
from jrl.ops import FlowSchedule, NoiseSchedule
from jrl.typing import Params

from .pictures import COLOURS, SHAPES

WORDS = ("", *COLOURS, *SHAPES)
"""All that a prompt may consist of; the empty one fills it up."""
PROMPT_WORDS = 2
WORD_WIDTH = 32
FACTORS = {16: 2, 32: 4}
"""Pixels along the edge of one latent, by those of the picture: latents are 8 × 8 in either case."""


@dataclass(frozen=True)
class PixelShuffle:
    """Squares of pixels as channels of a latent, exactly and both ways; it has no weights.

    Attributes:
      factor: Pixels along the edge of a square.
    """

    factor: int

    @property
    def channels(self) -> int:
        """Channels of a latent: three for each pixel of its square."""
        return 3 * self.factor**2

    def encode(self, images: np.ndarray) -> np.ndarray:
        """(B, height, width, 3) in [0, 1] to latents in [−1, 1]."""
        rows, height, width, _ = images.shape
        split = images.reshape(rows, height // self.factor, self.factor, width // self.factor, self.factor, 3)
        squares = split.transpose(0, 1, 3, 2, 4, 5)
        return 2.0 * squares.reshape(*squares.shape[:3], self.channels) - 1.0

    def decode(
        self, params: Params, latents: Float[Array, "B Y X C"], *, dtype: Any
    ) -> Float[Array, "B Z W 3"]:
        """The inverse, clipped to [0, 1]; `params` is empty and `dtype` has nothing to compute."""
        del params, dtype
        rows, height, width, _ = latents.shape
        squares = latents.reshape(rows, height, width, self.factor, self.factor, 3)
        pixels = squares.transpose(0, 1, 3, 2, 4, 5)
        images = pixels.reshape(rows, height * self.factor, width * self.factor, 3)
        return jnp.clip(images / 2.0 + 0.5, 0.0, 1.0)


@dataclass(frozen=True)
class WordTable:
    """A vector for each word."""

    def encode(self, params: Params, tokens: Int[Array, "B Q"], *, dtype: Any) -> Float[Array, "B Q D"]:
        """Looks them up."""
        return jnp.take(params["embedding"], tokens, axis=0).astype(dtype)


def read_words(texts: Sequence[str]) -> Int[np.ndarray, "B Q"]:
    """Numbers of a prompt's words, filled up with the empty one.

    Raises:
      ValueError: If a prompt has a word that no picture was described with, or too many.
    """
    rows = np.zeros((len(texts), PROMPT_WORDS), np.int32)
    for row, text in enumerate(texts):
        words = text.split()
        unknown = [word for word in words if word not in WORDS]
        if unknown or len(words) > PROMPT_WORDS:
            raise ValueError(
                f"a prompt must be a colour and a shape, of {', '.join(WORDS[1:])}, got {text!r}."
            )
        rows[row, : len(words)] = [WORDS.index(word) for word in words]
    return rows


# The U-Net predicts clean pictures: noise has as many dimensions at each place as latents have channels, more than one
# so narrow can carry; smooth pictures have few.
DDIM = NoiseSchedule(
    beta_start=0.00085,
    beta_end=0.012,
    beta_schedule="scaled_linear",
    clip_sample=False,
    steps_offset=1,
    prediction_type="sample",
)
"""Noise as that of Stable Diffusion 1."""
FLOW = FlowSchedule(spacing="uniform", prediction_type="sample")
"""A rectified flow, whose velocity is (x − x̂0)/σ."""


def toy_model(
    size: int, *, seed: int | None, schedule: NoiseSchedule | FlowSchedule = DDIM
) -> DiffusionModel:
    """A model of pictures of this size.

    Args:
      size: Pixels along an edge, 16 or 32.
      seed: Of random weights; None: shapes alone, where weights will be read from a file.
      schedule: `DDIM` or `FLOW`.
    """
    vae = PixelShuffle(FACTORS[size])
    unet = UNet(
        UNetConfig(
            sample_size=size // vae.factor,
            in_channels=vae.channels,
            out_channels=vae.channels,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            block_out_channels=(16, 32),
            layers_per_block=1,
            cross_attention_dim=WORD_WIDTH,
            attention_head_dim=4,
            norm_num_groups=8,
        )
    )

    def init(key: Any) -> dict[str, Any]:
        unet_key, word_key = jax.random.split(key)
        words = jax.random.normal(word_key, (len(WORDS), WORD_WIDTH))
        return {"unet": unet.init(unet_key), "vae": {}, "text_encoder": {"embedding": words}}

    if seed is None:
        weights = jax.eval_shape(init, jax.random.key(0))
    else:
        weights = jax.device_get(jax.jit(init)(jax.random.key(seed)))
    return DiffusionModel(
        name=f"shapes of {size} x {size} pixels",
        unet=unet,
        vae=vae,
        text_encoder=WordTable(),
        tokenizer=read_words,
        schedule=schedule,
        weights=weights,
        sample_size=(size // vae.factor,) * 2,
    )


def save_weights(path: Path, weights: Mapping[str, Params]) -> None:
    """Writes all weights, named by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(dict(weights))
    np.savez(path, **{jax.tree_util.keystr(where): leaf for where, leaf in leaves})


def load_weights(path: Path, like: Mapping[str, Params]) -> dict[str, Params]:
    """Reads what `save_weights` wrote.

    Args:
      path: The file.
      like: A tree of the same structure and shapes.
    Raises:
      ValueError: If the file has other weights.
    """
    with np.load(path, allow_pickle=False) as file:
        found = dict(file)
    leaves, structure = jax.tree_util.tree_flatten_with_path(dict(like))
    wanted = {jax.tree_util.keystr(where): leaf.shape for where, leaf in leaves}
    if {name: leaf.shape for name, leaf in found.items()} != wanted:
        raise ValueError(f"{path} holds other weights than this model's. Was it written for another size?")
    return jax.tree_util.tree_unflatten(structure, [found[name] for name in wanted])
