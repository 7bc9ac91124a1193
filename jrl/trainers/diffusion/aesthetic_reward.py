# SPDX-License-Identifier: Apache-2.0
"""The LAION aesthetic predictor as a reward that JAX can differentiate: linear layers on CLIP's vector of an image.

It was trained on ratings of people from 1 to 10 (github.com/christophschuhmann/improved-aesthetic-predictor). It is the
aesthetic reward of Black et al. 2023, arXiv:2305.13301, and of the examples of DDPO that followed. Between its layers
are dropouts, which do nothing here, and no activations.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jrl.models.diffusion.clip_model import ClipImages, is_ignored_by_images
from jrl.models.diffusion.part_files import read_part
from jrl.models.safetensors_io import SUFFIX, TensorFiles
from jrl.trainers.diffusion.clip_reward import FILES, Pixels, find_clip, unit
from jrl.typing import DifferentiableReward, Params

CLIP = "openai/clip-vit-large-patch14"
WIDTHS = (1024, 128, 64, 16, 1)
"""Outputs of the layers."""
LAYERS = ("layers.0", "layers.2", "layers.4", "layers.6", "layers.7")
"""Their names in the file: dropouts are counted among them."""


def load_aesthetic_reward(
    head: str | os.PathLike[str], *, clip: str | os.PathLike[str] = CLIP, revision: str = "main"
) -> DifferentiableReward:
    """The aesthetic score of an image, about 1 to 10, whatever the prompt.

    It is a reward for `RewardGradientTrainer`, and for DDPO.

    Args:
      head: The predictor's weights as safetensors, with the names of its state dict (`layers.0.weight`, ...). A file of
        torch is refused, with the line that converts it.
      clip: Folder or hub id of the `CLIPModel` whose vectors it reads, with `preprocessor_config.json`.
      revision: Branch, tag or commit of that, on the hub.
    Raises:
      FileNotFoundError: If a file is missing, or the weights are a pickle.
      ValueError: If tensors are not those of the predictor, or its inputs are not as wide as CLIP's vectors.
    """
    weights = _tensor_file(Path(head))
    folder, towers, pixels = find_clip(clip, revision=revision)
    layers = _read_layers(weights, towers.config.text.projection_dim)
    images = ClipImages(towers.config)
    vision = read_part(folder, images, FILES._replace(is_ignored=is_ignored_by_images), None)
    return DifferentiableReward(score=AestheticScore(images, pixels), params={"clip": vision, "head": layers})


@dataclass(frozen=True)
class AestheticScore:
    """Score of images.

    Attributes:
      clip: The tower of images.
      pixels: Rule by which images become what it reads.
    """

    clip: ClipImages
    pixels: Pixels

    def __call__(self, params: Params, images: Array, conditions: Any) -> Float[Array, "B"]:
        """(B,) scores of images (B, height, width, 3) in [0, 1]."""
        del conditions
        seen = self.clip.encode_image(params["clip"], self.pixels(images), dtype=jnp.float32)
        return predicted_score(params["head"], unit(seen))


def predicted_score(layers: Params, vectors: Float[Array, "B P"]) -> Float[Array, "B"]:
    """Scores of vectors of length 1.

    Args:
      layers: Kernel and bias of each layer, by its name.
      vectors: Of images.
    """
    for name in LAYERS:
        vectors = vectors @ layers[name]["kernel"] + layers[name]["bias"][None]
    return vectors[:, 0]


def _tensor_file(path: Path) -> TensorFiles:
    """The file, with its header read."""
    if path.suffix == SUFFIX:
        if not path.is_file():
            raise FileNotFoundError(f"the aesthetic predictor: there is no file {path}.")
        return TensorFiles(path.parent, path.stem)
    target = path.with_suffix(SUFFIX)
    raise FileNotFoundError(
        f"the aesthetic predictor must be a {SUFFIX} file, got {path}. If that is a file of torch, it is a pickle, "
        "which can run code when it is read. Convert it once, where torch is: "
        'python -c "import torch; from safetensors.torch import save_file; '
        f"save_file(torch.load('{path}', map_location='cpu', weights_only=True), '{target}')\""
    )


def _read_layers(files: TensorFiles, width: int) -> dict[str, dict[str, np.ndarray]]:
    """Kernels and biases of all layers.

    Raises:
      ValueError: If tensors are missing, unknown or of another shape.
    """
    expected: dict[str, tuple[int, ...]] = {}
    for name, inputs, outputs in zip(LAYERS, (width, *WIDTHS), WIDTHS, strict=False):
        expected |= {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}
    found = {name: tuple(files.info[name].shape) for name in files}
    if found != expected:
        names = sorted(expected.keys() | found.keys())
        wrong = [name for name in names if expected.get(name) != found.get(name)]
        said = "; ".join(
            f"{name} must have shape {expected.get(name, 'none')}, got {found.get(name, 'none')}"
            for name in wrong[:3]
        )
        raise ValueError(
            f"{files.source}: {len(wrong)} tensors are not those of an aesthetic predictor on vectors of {width} "
            f"numbers: {said}. Is it for another CLIP?"
        )
    return {
        name: {
            "kernel": np.ascontiguousarray(files.read(f"{name}.weight", np.float32).T),
            "bias": files.read(f"{name}.bias", np.float32),
        }
        for name in LAYERS
    }
