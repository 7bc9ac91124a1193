# SPDX-License-Identifier: Apache-2.0
"""Images on their way out of a run: to PNG files, as grids with captions, and to a tracker."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8


class ImageError(ValueError):
    """A model's images are none: they do not lie in [0, 1]."""


SHOWN = 16
"""Most images of one grid."""
_CAPTION, _GAP, _SMALLEST = 26, 4, 96
_LINE = 30


def to_bytes(image: Float[np.ndarray, "3 Y X"]) -> UInt8[np.ndarray, "Y X 3"]:
    """An image in [0, 1], channels first, as 8-bit pixels with channels last, rounded."""
    return (np.clip(np.moveaxis(image, 0, -1), 0, 1) * 255).round().astype(np.uint8)


def to_pil(image: Float[np.ndarray, "3 Y X"]) -> Any:
    """An image in [0, 1], channels first, as one of Pillow's.

    Raises:
      ImportError: If Pillow is not installed.
    """
    return _pil().fromarray(to_bytes(image))


def save_image(path: Path, image: Float[np.ndarray, "3 Y X"]) -> str:
    """Writes one image as PNG, or as an array of NumPy's where Pillow is not installed.

    Args:
      path: Of the file, without an ending; its folder exists.
      image: In [0, 1].
    Returns:
      The file's name.
    """
    if has_pillow():
        to_pil(image).save(path.with_suffix(".png"))
        return f"{path.name}.png"
    np.save(path.with_suffix(".npy"), image)
    return f"{path.name}.npy"


def save_grid(path: Path, images: Float[np.ndarray, "B 3 Y X"], captions: Sequence[str]) -> None:
    """Writes the first images as one PNG, in a square as far as they go, each over its caption.

    Small images are enlarged by whole factors, pixel by pixel, so that they can be looked at.

    Args:
      path: Of the file; its folder is made.
      images: In [0, 1].
      captions: One an image; what is too long is cut.
    Raises:
      ImportError: If Pillow is not installed.
    """
    pillow = _pil()
    from PIL import ImageDraw

    count = min(len(images), SHOWN)
    columns = math.ceil(math.sqrt(count))
    factor = max(1, _SMALLEST // min(images.shape[2:]))
    height, width = (size * factor for size in images.shape[2:])
    size = columns * (width + _GAP), math.ceil(count / columns) * (height + _CAPTION + _GAP)
    sheet = pillow.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    letters = max(4, width // 6)  # of the built-in font, 6 pixels wide
    for number in range(count):
        row, column = divmod(number, columns)
        x, y = column * (width + _GAP), row * (height + _CAPTION + _GAP)
        pixels = np.kron(to_bytes(images[number]), np.ones((factor, factor, 1), np.uint8))
        sheet.paste(pillow.fromarray(pixels), (x, y))
        text = captions[number].encode("ascii", "replace").decode()  # the built-in font has no other letters
        draw.text((x, y + height), f"{text[:letters]}\n{text[letters : 2 * letters]}", fill="black")
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)


def caption(prompt: str, reward: float | None = None) -> str:
    """A shortened prompt, with its reward where there is one."""
    short = prompt if len(prompt) <= _LINE else f"{prompt[: _LINE - 1]}…"
    return short if reward is None else f"{reward:.3g} | {short}"


def named_images(images: Float[np.ndarray, "B 3 Y X"], captions: Sequence[str]) -> dict[str, np.ndarray]:
    """Caption → 8-bit image with channels last, the first of them; equal captions are numbered."""
    found: dict[str, np.ndarray] = {}
    for image, name in list(zip(images, captions, strict=True))[:SHOWN]:
        unique, number = name, 2
        while unique in found:
            unique, number = f"{name} ({number})", number + 1
        found[unique] = to_bytes(image)
    return found


def as_pixels(image: Any) -> UInt8[np.ndarray, "Y X 3"]:
    """Converts a user's image (3 Y X, or 1 3 Y X, in [0, 1], of any library) to 8-bit pixels.

    Raises:
      ValueError: If it is something else.
    """
    array = np.asarray(image, np.float32)
    array = array[0] if array.ndim == 4 and len(array) == 1 else array
    if array.ndim != 3 or len(array) != 3:
        raise ValueError(
            f"`log_images` must be given images of the shape (3, height, width), got {np.shape(image)}."
        )
    return to_bytes(array)


def has_pillow() -> bool:
    """True where Pillow is installed."""
    return importlib.util.find_spec("PIL") is not None


def _pil() -> Any:
    """Pillow, which only what writes images needs.

    Raises:
      ImportError: Naming the extra that brings it.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("Images are written by Pillow: pip install pillow.") from error
    return Image
