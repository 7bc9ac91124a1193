# SPDX-License-Identifier: Apache-2.0
"""The tensor files of a Hugging Face folder: one `model.safetensors`, or several with an index."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# transformers refuses files that do not name the framework whose layout they follow.
_METADATA = {"format": "pt"}


class TensorFiles:
    """All tensors of a folder by name, read one at a time.

    Raises:
      FileNotFoundError: If the folder holds no safetensors, or a file that its index lists is missing.
      ValueError: If a file is damaged.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._open: dict[str, Any] = {}
        if (folder / WEIGHTS).is_file():
            self._where = dict.fromkeys(self._file(WEIGHTS).keys(), WEIGHTS)
        elif (folder / INDEX).is_file():
            self._where = json.loads((folder / INDEX).read_text())["weight_map"]
        else:
            raise FileNotFoundError(_no_weights(folder))

    def __iter__(self) -> Iterator[str]:
        """Names of the tensors."""
        return iter(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return tuple(self._slice(name).get_shape())

    def read(self, name: str) -> np.ndarray:
        """One tensor, in the dtype of the file."""
        return np.asarray(self._file(self._where[name]).get_tensor(name))

    def _slice(self, name: str) -> Any:
        file = self._file(self._where[name])
        try:
            return file.get_slice(name)
        except SafetensorError as error:
            path = self.folder / self._where[name]
            raise ValueError(f"{path} holds no {name}, though {INDEX} says so: {error}.") from error

    def _file(self, name: str) -> Any:
        if name not in self._open:
            path = self.folder / name
            if not path.is_file():
                raise FileNotFoundError(
                    f"{path} is missing, though {INDEX} lists it. Is the download complete?"
                )
            try:
                self._open[name] = safe_open(path, "numpy")
            except SafetensorError as error:
                raise ValueError(
                    f"{path} is not a readable safetensors file: {error}. Is it cut off?"
                ) from error
        return self._open[name]


def _no_weights(folder: Path) -> str:
    pickled = sorted(file.name for file in folder.glob("*.bin"))
    if not pickled:
        return f"{folder} is not a model checkpoint: it has neither {WEIGHTS} nor {INDEX}."
    return (
        f"{folder} holds {pickled[0]}, a pickle, which can run code when it is read. Convert it once, where "
        f'you trust it: python -c "from transformers import AutoModelForCausalLM as M; '
        f"M.from_pretrained('{folder}').save_pretrained('{folder}')\""
    )


class LazyTensor(NamedTuple):
    """A tensor that is made when it is written, so that the host never holds a second copy of the model.

    Attributes:
      num_bytes: Its size.
      make: Gives the array.
    """

    num_bytes: int
    make: Callable[[], np.ndarray]


def write_tensors(folder: Path, tensors: Mapping[str, LazyTensor], *, max_shard_bytes: int) -> None:
    """Writes tensors under Hugging Face's file names, with an index where one file would be too large.

    Args:
      folder: An existing folder.
      tensors: By name; written in this order.
      max_shard_bytes: A file grows to this size at most, unless a single tensor is larger.
    """
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.num_bytes
    if len(shards) == 1:
        _write(folder / WEIGHTS, shards[0], tensors)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write(folder / file_name, names, tensors)
        weight_map |= dict.fromkeys(names, file_name)
    total = sum(tensor.num_bytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2))


def _write(path: Path, names: list[str], tensors: Mapping[str, LazyTensor]) -> None:
    # safetensors writes the bytes as they lie in memory: a transposed view would be written untransposed.
    arrays = {name: np.ascontiguousarray(tensors[name].make()) for name in names}
    save_file(arrays, path, metadata=_METADATA)
