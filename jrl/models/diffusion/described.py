# SPDX-License-Identifier: Apache-2.0
"""A pipeline's folder as its configs describe it: networks without weights, tokenizers and schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jrl.models.diffusion.components import SCHEDULER
from jrl.models.diffusion.part_files import Network
from jrl.models.diffusion.parts import Denoiser, ImageDecoder, PromptTokenizer, TextEncoder
from jrl.models.hub import named_folder, read_json
from jrl.ops.flow_schedule import Schedule

CONFIG, SCHEDULER_CONFIG = "config.json", "scheduler_config.json"
_Read = TypeVar("_Read")


@dataclass(frozen=True, eq=False)
class DescribedFolder:
    """All of a folder but its weights.

    Attributes:
      unet: The denoiser.
      vae: Makes images of latents.
      text_encoder: Reads prompts.
      tokenizer: Makes ids of prompts.
      schedule: Of the noise.
      sample_size: (Y, X) of the latents where nobody asks for another size.
      parts: What has weights, by folder.
      places: Where these weights go in `DiffusionModel.weights`, by folder.
      tokenizers: What has a tokenizer's folder, by folder; each can `save_pretrained`.
      zero_negative: See `DiffusionModel`.
    """

    unet: Denoiser
    vae: ImageDecoder
    text_encoder: TextEncoder
    tokenizer: PromptTokenizer
    schedule: Schedule
    sample_size: tuple[int, int]
    parts: Mapping[str, Network]
    places: Mapping[str, tuple[str, ...]]
    tokenizers: Mapping[str, Any]
    zero_negative: bool = False


def read_config(folder: Path, name: str = CONFIG) -> dict[str, Any]:
    """Content of a component's config.

    Raises:
      FileNotFoundError: If there is none.
    """
    path = folder / name
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing. Is the download complete?")
    return read_json(path)


def described_part(folder: Path, read: Callable[[Mapping[str, Any]], _Read]) -> _Read:
    """Reads a component's config; the folder is named in what `read` refuses."""
    values = read_config(folder)
    with named_folder(folder):
        return read(values)


def described_schedule(folder: Path, make: Callable[[Mapping[str, Any]], Schedule]) -> Schedule:
    """The schedule of a pipeline's folder."""
    values = read_config(folder / SCHEDULER, SCHEDULER_CONFIG)
    with named_folder(folder / SCHEDULER):
        return make(values)


def check_fits(folder: Path, pairs: tuple[tuple[str, Any, str, Any], ...]) -> None:
    """Refuses a denoiser whose config does not fit the other parts.

    Args:
      folder: Of the denoiser.
      pairs: (key of its config, its value, what that must be the same as, that one's value).
    Raises:
      ValueError: Naming the key.
    """
    for key, got, other, expected in pairs:
        if got != expected:
            raise ValueError(
                f"{folder / CONFIG}: `{key}` must be {expected}, the {other}; got {got}. Is it a model for "
                "text to image, and are all parts of one model?"
            )
