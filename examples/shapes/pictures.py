# SPDX-License-Identifier: Apache-2.0
"""Pictures of one shape each: a circle or square in one of four colours, somewhere on a grey ground."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

COLOURS = {
    "red": (0.85, 0.15, 0.15),
    "green": (0.15, 0.7, 0.2),
    "blue": (0.15, 0.25, 0.85),
    "yellow": (0.9, 0.8, 0.15),
}
SHAPES = ("circle", "square")
PROMPTS = tuple(f"{colour} {shape}" for shape in SHAPES for colour in COLOURS)

_GREYS = (0.15, 0.65)
_RADII = (0.2, 0.32)
"""Half the width of a shape, as a share of the picture's."""
_SAMPLES = 4
"""Points a pixel and axis: edges are smoothed by averaging over them."""


def draw(indices: Sequence[int] | np.ndarray, *, size: int, rng: np.random.Generator) -> np.ndarray:
    """Draws pictures of given prompts; place, size and ground of each are random.

    Args:
      indices: Into `PROMPTS`, one a picture.
      size: Pixels of a side.
      rng: Of place, size and ground.
    Returns:
      (B, size, size, 3) float32 in [0, 1].
    """
    chosen = np.asarray(indices)
    count = len(chosen)
    radius = rng.uniform(*_RADII, (count, 1, 1)) * size
    # Within the picture, with a pixel to spare.
    row, column = (rng.uniform(radius + 1, size - 1 - radius) for _ in range(2))
    centres = (np.arange(size * _SAMPLES) + 0.5) / _SAMPLES
    down, right = centres[None, :, None] - row, centres[None, None, :] - column
    is_circle = (chosen < len(COLOURS))[:, None, None]
    inside = np.where(
        is_circle, down**2 + right**2 < radius**2, np.maximum(np.abs(down), np.abs(right)) < 0.886 * radius
    )  # 0.886: circle and square cover the same area
    share = inside.reshape(count, size, _SAMPLES, size, _SAMPLES).mean(axis=(2, 4))[..., None]
    colour = np.asarray(list(COLOURS.values()))[chosen % len(COLOURS)][:, None, None]
    ground = rng.uniform(*_GREYS, (count, 1, 1, 1))
    return (share * colour + (1.0 - share) * ground).astype(np.float32)
