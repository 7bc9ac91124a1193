# SPDX-License-Identifier: Apache-2.0
"""The tensor files of a Hugging Face folder, written: one tensor in memory at a time, in files of a chosen size.

`safetensors.numpy.save_file` takes all arrays of a file at once, laid out as they are written. A model's are fetched
from devices and often transposed: that would hold a copy of every file (5 GB) on the host, where this holds one tensor
and 1 MiB of rows (`test_host_memory_of_one_tensor`).
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jrl.models.safetensors_io import DTYPES, HEADS_FOLDER, INDEX_SUFFIX, PIECE_BYTES, SUFFIX

_LENGTH_BYTES = 8
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# transformers refuses files that do not name the framework whose layout they follow.
_METADATA = {"format": "pt"}


def is_model_file(path: str) -> bool:
    """True for paths of a folder that hold tensors of a model, of heads or an adapter, or describe them."""
    folder, _, name = path.rpartition("/")
    stems = {"": ("model", "adapter_model"), HEADS_FOLDER: ("model",)}.get(folder, ())
    if not folder and name == "adapter_config.json":
        return True
    return name.startswith(stems) and name.endswith((SUFFIX, INDEX_SUFFIX))


class LazyTensor(NamedTuple):
    """A tensor that is made when it is written, so that the host never holds a second copy of the model.

    Attributes:
      dtype: Of the array.
      shape: Of the array.
      make: Gives the array.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(
    folder: Path, tensors: Mapping[str, LazyTensor], *, max_shard_bytes: int, stem: str = "model"
) -> None:
    """Writes tensors under Hugging Face's file names, with an index where one file would be too large.

    Args:
      folder: Exists.
      tensors: By name; each is made once, written, and let go before the next.
      max_shard_bytes: A file is larger only if a single tensor is.
      stem: As for `TensorFiles`.
    Raises:
      ValueError: If `max_shard_bytes` is no positive whole number.
    """
    is_whole = isinstance(max_shard_bytes, int) and not isinstance(max_shard_bytes, bool)
    if not is_whole or max_shard_bytes < 1:
        raise ValueError(
            f"`max_shard_bytes` must be a positive whole number of bytes, got {max_shard_bytes!r}. Is it a "
            "text with a unit, as transformers takes it?"
        )
    # Here: it imports much, and most programs write nothing.
    from huggingface_hub import split_state_dict_into_shards_factory

    by_name: dict[str, Any] = dict(tensors)
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda tensor: tensor.num_bytes,
        filename_pattern=f"{stem}{{suffix}}{SUFFIX}",
        max_shard_size=max_shard_bytes,
    )
    for file_name, names in split.filename_to_tensors.items():
        write_file(folder / file_name, {name: tensors[name] for name in names})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / f"{stem}{INDEX_SUFFIX}").write_text(json.dumps(index, indent=2), encoding="utf-8")


def write_file(path: Path, tensors: Mapping[str, LazyTensor]) -> None:
    """Writes one safetensors file, holding one tensor in memory at a time."""
    # Wide elements first, so that each lies at a multiple of its size: some readers map the file.
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": _METADATA}
    position = 0
    for name in order:
        tensor = tensors[name]
        stop = position + tensor.num_bytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": [position, stop],
        }
        position = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    with path.open("wb", buffering=0) as file:
        file.write(len(text).to_bytes(_LENGTH_BYTES, "little"))
        file.write(text)
        for name in order:
            _write_array(file, tensors[name], name)


def _write_array(file: io.FileIO, tensor: LazyTensor, name: str) -> None:
    array = tensor.make()
    assert (array.dtype, array.shape) == (tensor.dtype, tensor.shape), (name, array.dtype, array.shape)
    if array.ndim == 0:
        array = array.reshape(1)
    # By rows: a transposed view must be laid out anew, and a second copy of all of it would be as large as it.
    rows = max(1, PIECE_BYTES // max(1, array[:1].nbytes)) if array.size else 1
    for start in range(0, array.shape[0] if array.size else 0, rows):
        _write_rows(file, array[start : start + rows])


def _write_rows(file: io.FileIO, rows: np.ndarray) -> None:
    view = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
    while view:
        view = view[file.write(view) :]
