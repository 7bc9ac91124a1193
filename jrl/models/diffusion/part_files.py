# SPDX-License-Identifier: Apache-2.0
"""The tensors of one part of a pipeline's folder, read to the host: all of them, and no other."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from flax import traverse_util

from jrl.models.diffusion import clip_entries, t5_encoder, vae_entries
from jrl.models.diffusion.entries import as_stored
from jrl.models.entries_io import check_entries, flat_tree, initial_shapes, some
from jrl.models.families.base import Entry, Shape
from jrl.models.safetensors_io import INDEX_SUFFIX, SUFFIX, TensorFiles
from jrl.typing import Params, PRNGKey

# What is kept as it lies in the file; other kinds of numbers become float32.
_KEPT = ("float32", "float16", "bfloat16")
VARIANT = "fp16"


class PartFiles(NamedTuple):
    """Naming of a part's tensor files.

    Attributes:
      stem: Of the files.
      current_name: The table's name of a tensor of any age.
      is_ignored: Whether a tensor of such a name holds nothing that is learned.
    """

    stem: str
    current_name: Callable[[str], str] = str
    is_ignored: Callable[[str], bool] = lambda name: False


_T5_FILES = PartFiles("model", is_ignored=t5_encoder.is_ignored)
PART_FILES: Mapping[str, PartFiles] = {
    "unet": PartFiles("diffusion_pytorch_model"),
    "transformer": PartFiles("diffusion_pytorch_model"),
    "vae": PartFiles("diffusion_pytorch_model", vae_entries.current_name),
    "text_encoder": PartFiles("model", clip_entries.current_name, clip_entries.is_ignored),
    "text_encoder_2": PartFiles("model", clip_entries.current_name, clip_entries.is_ignored),
    "text_encoder_3": _T5_FILES,
}


class Network(Hashable, Protocol):
    """A network that has a folder; parts are equal where their configs are."""

    def init(self, key: PRNGKey) -> Params:
        """Fresh weights; only their shapes are asked for."""

    def entries(self) -> list[Entry]:
        """Every tensor of its file."""

    def stored_config(self) -> dict[str, Any]:
        """Contents of the part's config.json."""


def files_of(name: str, part: Network) -> PartFiles:
    """Naming of a part's files, by its folder; a T5 stands in one or another of those of text encoders."""
    return _T5_FILES if isinstance(part, t5_encoder.T5Encoder) else PART_FILES[name]


def read_part(folder: Path, part: Network, filed: PartFiles, variant: str | None) -> dict[str, Any]:
    """Reads the weights of a part: NumPy arrays, in the dtype of the file.

    Args:
      folder: Of the part.
      part: What the weights belong to.
      filed: How its files are called.
      variant: As for `load_diffusion_model`.
    Raises:
      FileNotFoundError: If there are no tensors, or only pickled ones.
      ValueError: If tensors are missing, unknown, of another shape or not finite; the message names file and tensor.
    """
    files = _tensor_files(folder, filed.stem, variant)
    names: dict[str, str] = {}
    for name in files:
        current = filed.current_name(name)
        if current in names:
            raise ValueError(f"{files.source}: {names[current]} and {name} are the same tensor.")
        names[current] = name
    entries = as_stored(part.entries(), {current: files.info[name].shape for current, name in names.items()})
    _check_names(files, entries, names, filed.is_ignored)
    check_entries(files, entries, names, is_ignored=filed.is_ignored, what=folder.name)
    shapes, found = _shapes(part), {}
    for entry in entries:
        (path,) = entry.paths
        stored = files.info[names[entry.name]].dtype
        dtype = stored if stored.name in _KEPT else np.float32
        tensor = files.read(names[entry.name], dtype)
        (found[path],) = entry.transform.load(tensor, [shapes[path]])
        assert found[path].shape == shapes[path], (path, found[path].shape)
    assert found.keys() == shapes.keys(), found.keys() ^ shapes.keys()
    return dict(traverse_util.unflatten_dict(found, sep="/"))


@functools.lru_cache(maxsize=32)
def _shapes(part: Network) -> dict[str, Shape]:
    """Shapes of all parameters, by path; `init` is traced once for all models of one kind."""
    return {path: leaf.shape for path, leaf in flat_tree(initial_shapes(part.init)).items()}


def _tensor_files(folder: Path, stem: str, variant: str | None) -> TensorFiles:
    """The files that are asked for, or else, said aloud, those that are there."""
    asked, other = (_names(stem, kind) for kind in (variant, VARIANT if variant is None else None))
    for weights, index in (asked, other):
        if not any((folder / name).is_file() for name in (f"{weights}{SUFFIX}", index)):
            continue
        if weights != asked[0]:
            warnings.warn(
                f"{folder} has no {asked[0]}{SUFFIX}: {weights}{SUFFIX} is read in its place.", stacklevel=4
            )
        return TensorFiles(folder, weights, index)
    return TensorFiles(folder, stem)


def _names(stem: str, variant: str | None) -> tuple[str, str]:
    """Stem of the only file of a variant, and name of the index of several."""
    if variant is None:
        return stem, f"{stem}{INDEX_SUFFIX}"
    return f"{stem}.{variant}", f"{stem}{SUFFIX}.index.{variant}.json"


def _check_names(
    files: TensorFiles,
    entries: list[Entry],
    names: Mapping[str, str],
    is_ignored: Callable[[str], bool],
) -> None:
    """A tensor under a wrong name is both missing and unknown: one message says both."""
    known = {entry.name for entry in entries}
    missing = sorted(known - set(names))
    unknown = sorted(name for name in names if name not in known and not is_ignored(name))
    if missing and unknown:
        raise ValueError(
            f"{files.source}: {len(missing)} tensors are missing: {some(missing)}; and {len(unknown)} have no place: "
            f"{some([names[name] for name in unknown])}. Is the config that of these weights?"
        )
