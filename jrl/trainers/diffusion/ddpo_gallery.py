# SPDX-License-Identifier: Apache-2.0
"""Galleries of a run's images: a few PNG grids in its folder, and its tracker."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jrl.distributed import is_main
from jrl.trainers.config.sections import TrainConfig
from jrl.trainers.diffusion.images import as_pixels, caption, has_pillow, named_images, save_grid
from jrl.trainers.loggers.loggers import ImageLogger

GRIDS = "rollouts"
"""Folder of grids within a run's."""


class Tracker:
    """The run's trackers, to which a user's hook may log; with none, every call is harmless.

    Args:
      loggers: Of the run.
    """

    def __init__(self, loggers: Sequence[ImageLogger] = ()) -> None:
        self._loggers = tuple(loggers)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Numbers, one a name.

        Args:
          values: Name → number.
          step: Optimizer steps so far.
        """
        for logger in self._loggers:
            logger.log(dict(values), step)

    def log_images(self, values: Mapping[str, Any], step: int) -> None:
        """Images, one a name.

        Args:
          values: Name → image (3 Y X) or (1 3 Y X) in [0, 1].
          step: Optimizer steps so far.
        Raises:
          ValueError: If one has another shape.
        """
        pixels = {name: as_pixels(image) for name, image in values.items()}
        for logger in self._loggers:
            logger.log_images(pixels, step)


class Gallery:
    """Grids of a run's images; without Pillow there are none, and a warning says so.

    Args:
      train: Says where samples go.
      run_dir: The run's folder.

    Attributes:
      tracker: The run's, while it goes on.
      last: [images, prompts, metadata, rewards, reward metadata] of the last sampling batch; None before any.
    """

    def __init__(self, train: TrainConfig, run_dir: Path) -> None:
        self._folder = Path(train.rollout_logging_dir or run_dir / GRIDS)
        self._draws = has_pillow()
        if not self._draws:
            warnings.warn(
                "Pillow is not installed, so no grids of images are written: pip install pillow.",
                stacklevel=4,
            )
        self.tracker = Tracker()
        self.last: list[Any] | None = None

    def begin(self, loggers: Sequence[ImageLogger]) -> None:
        """Shows images to the trackers of a run, too.

        Args:
          loggers: The run's.
        """
        self.tracker = Tracker(loggers)

    def keep(self, batch: list[Any]) -> None:
        """Remembers a sampling batch for the next evaluation.

        Args:
          batch: [images, prompts, metadata, rewards, reward metadata].
        """
        self.last = batch

    def show_last(self, step: int) -> None:
        """The last sampling batch, where there is one."""
        if self.last is not None:
            images, prompts, _, rewards, _ = self.last
            self.show("samples", images, prompts, rewards, step)

    def show(
        self, kind: str, images: np.ndarray, prompts: Sequence[str], rewards: np.ndarray, step: int
    ) -> None:
        """The first images as `<kind>_<step>.png`, and to the trackers; of several processes process 0 shows them.

        Args:
          kind: "samples" or "evaluation".
          images: (B 3 Y X), in [0, 1].
          prompts: One an image.
          rewards: Likewise.
          step: Optimizer steps so far.
        """
        if not is_main():
            return
        captions = [caption(prompt, float(reward)) for prompt, reward in zip(prompts, rewards, strict=True)]
        if self._draws:
            path = self._folder / f"{kind}_{step:06d}.png"
            try:
                save_grid(path, images, captions)
            except OSError as error:  # a full disk costs a picture, not the run
                warnings.warn(f"{path} could not be written: {error}.", stacklevel=4)
        named = {
            f"{kind}/{name}": pixels.transpose(2, 0, 1) / np.float32(255)
            for name, pixels in named_images(images, captions).items()
        }
        self.tracker.log_images(named, step)
