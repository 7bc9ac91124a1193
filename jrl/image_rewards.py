# SPDX-License-Identifier: Apache-2.0
"""Reward functions of images that need no network: `--reward jrl.image_rewards:jpeg_compressibility`.

Each has the signature that `DDPOTrainer` calls, `(images, prompts, metadata) -> (rewards, reward_metadata)`: images are
(B, 3, height, width) floats in [0, 1], rewards (B,) float32, one an image, whatever the prompt; these functions have
nothing to say beside them, so `reward_metadata` is empty. Whoever has a network that judges images wraps it in a
function of this form. `jrl.load_clip_reward` reads a CLIP, and `jrl.load_aesthetic_reward` LAION's predictor on one.

JPEG sizes and their quality: Black et al. 2023, arXiv:2305.13301, section 5.1 and its published code.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

__all__ = [
    "BY_NAME",
    "ImageReward",
    "brightness",
    "jpeg_compressibility",
    "jpeg_incompressibility",
    "target_colour",
]

ImageReward = Callable[[Any, Sequence[str], Sequence[Any]], tuple[np.ndarray, dict[str, Any]]]
"""`(images, prompts, metadata) -> (rewards, reward_metadata)`."""

JPEG_QUALITY = 95
_TOLERANCE = 1e-3
"""How far a rounding error may leave [0, 1]; what lies further out is another scale."""


def jpeg_compressibility(
    images: Any, prompts: Sequence[str], metadata: Sequence[Any]
) -> tuple[np.ndarray, dict[str, Any]]:
    """The less a JPEG file weighs, the more it is worth.

    Images are rounded to bytes and compressed by Pillow at quality 95. The file's header, some 600 bytes, counts too:
    in images of less than about 32 x 32 pixels little else does.

    Args:
      images: (B, 3, height, width), in [0, 1].
      prompts: One an image; not looked at.
      metadata: One an image; not looked at.
    Returns:
      Minus the size of each file in units of 1000 bytes, (B,) float32; no metadata.
    Raises:
      ImportError: If Pillow is not installed.
      TypeError: If the images are no floats.
      ValueError: If the images have another shape or range, or are not as many as the prompts.
    """
    return -_jpeg_sizes(_checked(images, prompts)), {}


def jpeg_incompressibility(
    images: Any, prompts: Sequence[str], metadata: Sequence[Any]
) -> tuple[np.ndarray, dict[str, Any]]:
    """The more a JPEG file weighs, the more it is worth: `jpeg_compressibility` with the other sign.

    Args:
      images: (B, 3, height, width), in [0, 1].
      prompts: One an image; not looked at.
      metadata: One an image; not looked at.
    Returns:
      The size of each file in units of 1000 bytes, (B,) float32; no metadata.
    Raises:
      ImportError: If Pillow is not installed.
      TypeError: If the images are no floats.
      ValueError: If the images have another shape or range, or are not as many as the prompts.
    """
    return _jpeg_sizes(_checked(images, prompts)), {}


def brightness(
    images: Any, prompts: Sequence[str], metadata: Sequence[Any]
) -> tuple[np.ndarray, dict[str, Any]]:
    """The mean over pixels and channels.

    Args:
      images: (B, 3, height, width), in [0, 1].
      prompts: One an image; not looked at.
      metadata: One an image; not looked at.
    Returns:
      Brightness, 0 of a black image and 1 of a white one, (B,) float32; no metadata.
    Raises:
      TypeError: If the images are no floats.
      ValueError: If the images have another shape or range, or are not as many as the prompts.
    Example:
      >>> images = np.stack([np.zeros((3, 8, 8)), np.full((3, 8, 8), 0.25)])
      >>> brightness(images, ("a", "b"), ({}, {}))[0].tolist()
      [0.0, 0.25]
    """
    return _checked(images, prompts).mean(axis=(1, 2, 3), dtype=np.float64).astype(np.float32), {}


def target_colour(rgb: Sequence[float]) -> ImageReward:
    """A reward for images of one colour.

    Args:
      rgb: Red, green and blue, each in [0, 1].
    Returns:
      A reward function: minus the mean squared distance of pixels and channels from the colour, in [−1, 0].
    Raises:
      ValueError: If these are not three numbers in [0, 1].
    Example:
      >>> red = target_colour((1.0, 0.0, 0.0))
      >>> round(float(red(np.zeros((1, 3, 8, 8)), ("a",), ({},))[0][0]), 4)
      -0.3333
    """
    colour = np.asarray(rgb, np.float64)
    if colour.shape != (3,) or not ((colour >= 0.0) & (colour <= 1.0)).all():
        raise ValueError(
            f"`rgb` must be three numbers in [0, 1], got {rgb!r}. Are they bytes? Divide by 255."
        )

    def reward(
        images: Any, prompts: Sequence[str], metadata: Sequence[Any]
    ) -> tuple[np.ndarray, dict[str, Any]]:
        distance = np.square(_checked(images, prompts) - colour.reshape(1, 3, 1, 1))
        return -distance.mean(axis=(1, 2, 3)).astype(np.float32), {}

    return reward


def _checked(images: Any, prompts: Sequence[str]) -> np.ndarray:
    """The images as an array, if they are what a reward function is promised."""
    found = np.asarray(images)
    if not np.issubdtype(found.dtype, np.floating):
        raise TypeError(
            f"`images` must be floats in [0, 1], got {found.dtype}. Are they bytes? Divide by 255."
        )
    if found.ndim != 4 or found.shape[1] != 3:
        hint = " Are the channels last? Use np.moveaxis(images, -1, 1)." if found.shape[-1:] == (3,) else ""
        raise ValueError(f"`images` must have shape (B, 3, height, width), got {found.shape}.{hint}")
    if len(prompts) != len(found):
        raise ValueError(
            f"`prompts` must be as many as `images`, {len(found)}, got {len(prompts)}. Are they of one batch?"
        )
    # Written so that NaN fails.
    if found.size and not (found.min() >= -_TOLERANCE and found.max() <= 1.0 + _TOLERANCE):
        raise ValueError(
            f"`images` must lie in [0, 1], got {found.min():.4g} to {found.max():.4g}. "
            "Are they bytes, or latents that were not decoded?"
        )
    return found


def _jpeg_sizes(images: np.ndarray) -> np.ndarray:
    """Bytes / 1000 of each image's file, (B,) float32."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(f"JPEG rewards need Pillow: pip install pillow ({error}).") from error
    pixels = np.rint(images * 255.0).astype(np.uint8)  # the tolerance is less than half a level
    sizes = []
    for image in np.moveaxis(pixels, 1, -1):
        file = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(image)).save(file, format="JPEG", quality=JPEG_QUALITY)
        sizes.append(file.tell())
    return np.asarray(sizes, np.float32) / np.float32(1000.0)


BY_NAME: Mapping[str, ImageReward] = {
    reward.__name__: reward for reward in (brightness, jpeg_compressibility, jpeg_incompressibility)
}
"""Rewards that a file or a flag may name."""
