# SPDX-License-Identifier: Apache-2.0
"""CLIP as a reward that JAX can differentiate: the cosine of an image and its prompt."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jrl.distributed import join
from jrl.models.diffusion.clip_model import Clip, is_ignored, read_clip_model_config
from jrl.models.diffusion.part_files import PartFiles, read_part
from jrl.models.diffusion.tokenizer import load_clip_tokenizer
from jrl.models.hub import download, local_folder, named_folder, read_json
from jrl.typing import DifferentiableReward, Params

CONFIG, PROCESSOR = "config.json", "preprocessor_config.json"
FILES = PartFiles("model", is_ignored=is_ignored)
_DOWNLOADED = (CONFIG, PROCESSOR, "model.safetensors", "tokenizer*.json", "vocab.json", "merges.txt")
_BICUBIC = 3
_STEPS = ("do_resize", "do_center_crop", "do_normalize")
_RESCALE = 1 / 255


class Pixels(NamedTuple):
    """Rule by which images become what a tower reads.

    Attributes:
      size: Pixels along an edge. The shorter one of an image is resized to it, and the middle of the longer one kept.
      mean: Of each channel, subtracted.
      deviation: Of each channel, by which is divided.
    """

    size: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def __call__(self, images: Float[Array, "B Y X 3"]) -> Float[Array, "B S S 3"]:
        """Normalised pixels of images in [0, 1], bicubic and differentiable."""
        height, width = images.shape[1:3]
        factor = self.size / min(height, width)
        # The shorter edge is exact; the longer one is rounded down, as image processors do.
        shape = tuple(
            self.size if edge == min(height, width) else math.floor(edge * factor) for edge in (height, width)
        )
        resized = jax.image.resize(images, (images.shape[0], *shape, 3), "cubic", antialias=True)
        top, left = ((edge - self.size) // 2 for edge in shape)
        square = resized[:, top : top + self.size, left : left + self.size]
        mean, deviation = (jnp.asarray(x).reshape(1, 1, 1, 3) for x in (self.mean, self.deviation))
        return (square - mean) / deviation


class FoundClip(NamedTuple):
    """A CLIP in a folder, without its weights.

    Attributes:
      folder: Where they lie.
      clip: The towers.
      pixels: Rule by which images become what the tower of images reads.
    """

    folder: Path
    clip: Clip
    pixels: Pixels


def load_clip_reward(path_or_repo: str | os.PathLike[str], *, revision: str = "main") -> DifferentiableReward:
    """The cosine between CLIP's vectors of an image and of its prompt, in [−1, 1].

    It is a reward for `RewardGradientTrainer`, and for DDPO.

    Args:
      path_or_repo: Folder or hub id of a `CLIPModel` with tokenizer and `preprocessor_config.json`.
      revision: Branch, tag or commit, on the hub.
    Raises:
      FileNotFoundError: If there is no such folder, or a file of it is missing.
      ValueError: If a config asks for what jrl lacks, or tensors are not those of their config.
    """
    folder, clip, pixels = find_clip(path_or_repo, revision=revision)
    text = clip.config.text
    tokenize = load_clip_tokenizer(
        folder, max_length=text.max_position_embeddings, vocab_size=text.vocab_size
    )

    def conditions(prompts: Sequence[str], metadata: Sequence[Any]) -> Any:
        return tokenize(prompts)

    return DifferentiableReward(
        score=ClipScore(clip, pixels), conditions=conditions, params=read_part(folder, clip, FILES, None)
    )


def find_clip(path_or_repo: str | os.PathLike[str], *, revision: str) -> FoundClip:
    """The folder of a CLIP, downloaded where it is none of this machine, and what its configs describe.

    Args:
      path_or_repo: As for `load_clip_reward`.
      revision: Likewise.
    Raises:
      FileNotFoundError: If there is no such folder, or a config of it is missing.
      ValueError: If a config asks for what jrl lacks.
    """
    join()  # before anything of JAX is computed
    found = local_folder(path_or_repo, argument="the CLIP model")
    folder = found or download(str(path_or_repo), _DOWNLOADED, ignored=(), revision=revision)
    values = _read(folder, CONFIG)
    with named_folder(folder):
        clip = Clip(read_clip_model_config(values))
        pixels = read_pixels(_read(folder, PROCESSOR), clip.config.vision.image_size)
    return FoundClip(folder, clip, pixels)


@dataclass(frozen=True)
class ClipScore:
    """Cosine between the vectors of images and texts.

    Attributes:
      clip: The towers.
      pixels: Rule by which images become what they read.
    """

    clip: Clip
    pixels: Pixels

    def __call__(self, params: Params, images: Array, tokens: Array) -> Float[Array, "B"]:
        """(B,) cosines of images (B, height, width, 3) in [0, 1] and rows of ids."""
        seen = self.clip.encode_image(params, self.pixels(images), dtype=jnp.float32)
        read = self.clip.encode_text(params, tokens, dtype=jnp.float32)
        return jnp.sum(unit(seen) * unit(read), axis=-1)


def read_pixels(values: Mapping[str, Any], size: int) -> Pixels:
    """The rule that a `preprocessor_config.json` describes.

    Args:
      values: Its content.
      size: Pixels along an edge that the tower reads.
    Raises:
      ValueError: If it asks for another rule than bicubic resizing, a crop of the middle, and mean and deviation.
    """
    crop, edge = values.get("crop_size", size), values.get("size", size)
    crops = set(crop.values()) if isinstance(crop, dict) else {crop}
    edges = {edge.get("shortest_edge")} if isinstance(edge, dict) else {edge}
    for name, holds, expected in (
        ("resample", values.get("resample", _BICUBIC) == _BICUBIC, f"{_BICUBIC}, bicubic"),
        ("rescale_factor", abs(values.get("rescale_factor", _RESCALE) - _RESCALE) < 1e-9, "1/255"),
        ("crop_size", crops == {size}, f"{size}, the image size of the model"),
        ("size", edges == {size}, f"a shortest edge of {size}, the image size of the model"),
        *((name, values.get(name, True) is True, "true") for name in _STEPS),
        *((name, len(values.get(name, ())) == 3, "three numbers") for name in ("image_mean", "image_std")),
    ):
        if not holds:
            raise ValueError(
                f"CLIP's {PROCESSOR}: `{name}` must be {expected} (else not implemented), got {values.get(name)!r}."
            )
    return Pixels(size, tuple(values["image_mean"]), tuple(values["image_std"]))


def unit(vectors: Float[Array, "B P"]) -> Float[Array, "B P"]:
    """Vectors of length 1."""
    return vectors / jnp.linalg.norm(vectors, axis=-1, keepdims=True)


def _read(folder: Path, name: str) -> dict[str, Any]:
    if not (folder / name).is_file():
        raise FileNotFoundError(f"{folder / name} is missing. Is it the folder of a whole CLIP model?")
    return read_json(folder / name)
