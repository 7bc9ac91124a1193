# SPDX-License-Identifier: Apache-2.0
"""What `save_checkpoint` of a pipeline wrote, read back into the trees that train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.models.adapters.lora import Lora
from jrl.models.diffusion.lora_files import read_lora
from jrl.models.diffusion.pipeline import LORA, UNET, DiffusionModel
from jrl.models.diffusion.saving import DIFFUSERS_STEM
from jrl.models.entries_io import check_entries, load_entries, parameter_targets
from jrl.models.safetensors_io import TensorFiles
from jrl.typing import Params


def read_trained(model: DiffusionModel, folder: Path, lora: Lora | None) -> Params:
    """What trains, as `DiffusionModel.split` lays it out.

    Args:
      model: Whose it is.
      folder: Holds `pytorch_lora_weights.safetensors`, or the folder `unet`.
      lora: The adapter that trains; None: the denoiser does.
    Raises:
      FileNotFoundError: If the folder holds no such thing.
      ValueError: If it holds other tensors.
    """
    if lora is not None:
        return {LORA: _adapters(model, folder, lora)}
    files = TensorFiles(folder / UNET, DIFFUSERS_STEM)
    entries = model.unet.entries()
    names = {entry.name: entry.name for entry in entries if entry.name in files}
    check_entries(files, entries, names, is_ignored=lambda _: False, what="denoiser")
    shapes = jax.eval_shape(model.unet.init, jax.random.key(0))
    targets, _ = parameter_targets({UNET: shapes}, dtype=jnp.float32)
    return {UNET: load_entries(files, entries, targets[UNET])}


def _adapters(model: DiffusionModel, folder: Path, lora: Lora) -> dict[str, Any]:
    """The matrices of a file, for an adapter whose scale may be another than the file's."""
    found = read_lora(folder, model.unet)
    scales = {module.name: module.scale for module in found.lora.modules}
    shapes = {module.name: (module.rank, module.size_in) for module in lora.modules}
    held = {name: np.shape(weights["A"]) for name, weights in found.adapters.items()}
    if held != shapes:
        wrong = sorted(held.items() ^ shapes.items())[0][0]
        raise ValueError(
            f"{folder} holds another adapter than the one that trains: {wrong} has A of {held.get(wrong)}, expected "
            f"{shapes.get(wrong)}."
        )
    return {
        module.name: {
            "A": found.adapters[module.name]["A"],
            "B": found.adapters[module.name]["B"] * np.float32(scales[module.name] / module.scale),
        }
        for module in lora.modules
    }
