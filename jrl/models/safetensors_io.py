# SPDX-License-Identifier: Apache-2.0
"""The tensor files of a Hugging Face folder, read: one `model.safetensors`, or several with an index.

Reading is the safetensors library's (https://huggingface.co/docs/safetensors). Here are the folder around its files,
one line for each that is damaged, and memory: a tensor is cast and checked piece by piece while it is read, and the
file is opened anew every 16 MiB, for the pages that the library maps count as this process's memory. Reading a tensor
costs its size in the dtype asked for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
HEADS_FOLDER = "heads"
"""Subfolder of a model's folder that may hold its heads, in a file of their own."""
DTYPES: Mapping[str, np.dtype[Any]] = {
    name: np.dtype(kind)
    for name, kind in {
        "F64": np.float64,
        "F32": np.float32,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "C64": np.complex64,
        "I64": np.int64,
        "I32": np.int32,
        "I16": np.int16,
        "I8": np.int8,
        "U64": np.uint64,
        "U32": np.uint32,
        "U16": np.uint16,
        "U8": np.uint8,
        "BOOL": np.bool_,
    }.items()
}
PIECE_BYTES, _MAPPED_BYTES = 1 << 20, 1 << 24
LFS_POINTER = "version https://git-lfs"
"""How a file begins that git-lfs left in the place of another one."""


class TensorInfo(NamedTuple):
    """Place and form of a stored tensor.

    Attributes:
      path: The file; of a model object, that.
      dtype: Of the stored elements.
      shape: As stored.
    """

    path: Any
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class Tensors(Protocol):
    """Tensors by name: those of files, or of a model object (`jrl.models.model_object`).

    Attributes:
      folder: Where they are.
      source: What names all of them.
      info: What each tensor is, by name.
    """

    folder: Any
    source: Any
    info: dict[str, TensorInfo]

    def __iter__(self) -> Iterator[str]:
        """Names of the tensors."""

    def read(self, name: str, dtype: Any = None, *, finite: bool = True) -> np.ndarray:
        """Reads a tensor, all of whose values must be finite, but where it is said that they need not be."""


class TensorFiles:
    """All tensors of a folder by name, read one at a time.

    Args:
      folder: Holds `<stem>.safetensors`, or `<stem>.safetensors.index.json` and the files it lists.
      stem: "adapter_model" for adapters.
      index: Name of the index where it has another one.

    Attributes:
      folder: As given.
      source: The file that names all tensors: the only one, or the index.
      info: What each tensor is, by name; all headers are read and checked at once, no tensor is.

    Raises:
      FileNotFoundError: If the folder holds no safetensors, or a file that its index lists is missing.
      ValueError: If a file or the index is damaged, or they contradict each other.
    """

    folder: Any
    source: Any

    def __init__(self, folder: Path, stem: str = "model", index: str | None = None):
        self.folder = folder
        weights, listing = folder / f"{stem}{SUFFIX}", folder / (index or f"{stem}{INDEX_SUFFIX}")
        if weights.is_file():
            self.source, self.info = weights, read_header(weights)
        elif listing.is_file():
            self.source, self.info = listing, _read_index(listing)
        else:
            raise FileNotFoundError(_no_weights(folder, stem))

    def __iter__(self) -> Iterator[str]:
        """Names of the tensors."""
        return iter(self.info)

    def read(self, name: str, dtype: Any = None, *, finite: bool = True) -> np.ndarray:
        """Reads a tensor.

        Args:
          name: Of the tensor.
          dtype: Of the result; None: the file's.
          finite: All values must be finite.
        Raises:
          ValueError: If the file ends early, or a value is NaN or infinite (in the file, or in `dtype`) where none may.
        """
        info = self.info[name]
        tensor = np.empty(info.shape, info.dtype if dtype is None else dtype)
        rows = tensor if info.shape else tensor.reshape(1)
        row_bytes = max(1, math.prod(info.shape[1:]) * info.dtype.itemsize)
        try:
            for mapped in _ranges(0, len(rows), _MAPPED_BYTES // row_bytes):
                with safe_open(info.path, "numpy") as file, np.errstate(all="ignore"):
                    for piece in _ranges(mapped.start, mapped.stop, PIECE_BYTES // row_bytes):
                        rows[piece] = file.get_slice(name)[piece] if info.shape else file.get_tensor(name)
                        if finite:
                            check_finite(rows[piece], info.path, name)
        except SafetensorError as error:
            raise _unreadable(info.path, error) from error
        return tensor


def check_finite(values: np.ndarray, path: Any, name: str) -> None:
    """Refuses NaN and infinity among the values of a tensor, or a piece of it.

    Raises:
      ValueError: Naming file and tensor.
    """
    if "float" in values.dtype.name and not np.isfinite(values).all():
        raise ValueError(
            f"{path}: {name} holds NaN or infinity (read as {values.dtype}). Did the run that wrote it diverge?"
        )


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Reads the contents of a safetensors file, by name.

    Raises:
      ValueError: If the header is damaged, or does not describe this file to its last byte.
    """
    try:
        with safe_open(path, "numpy") as file:
            described = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
            found = {name: (tensor.get_dtype(), tensor.get_shape()) for name, tensor in described.items()}
    except SafetensorError as error:
        raise _unreadable(path, error) from error
    unknown = [f"{name} is {dtype}" for name, (dtype, _) in found.items() if dtype not in DTYPES]
    if unknown:
        raise ValueError(
            f"{path}: {unknown[0]}, which NumPy has no numbers for. Load full-precision weights."
        )
    return {name: TensorInfo(path, DTYPES[dtype], tuple(shape)) for name, (dtype, shape) in found.items()}


def read_metadata(path: Path) -> dict[str, str]:
    """Reads a file's own metadata, after `read_header` found the header to be sound; {} where there is none."""
    with safe_open(path, "numpy") as file:
        return dict(file.metadata() or {})


def _ranges(start: int, stop: int, step: int) -> Iterator[slice]:
    """Slices of at most `step`, and at least one, that are start to stop."""
    step = max(1, step)
    return (slice(first, min(first + step, stop)) for first in range(start, stop, step))


def _unreadable(path: Path, error: SafetensorError) -> ValueError:
    with path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER.encode():
            return ValueError(
                f"{path} is a git-lfs pointer, not the weights: run `git lfs pull` in its repository."
            )
    why = str(error).removeprefix("Error while deserializing header: ")
    return ValueError(f"{path} is not a readable safetensors file: {why}. Is it cut off?")


def _is_file_name(name: str) -> bool:
    """True where a file of this name can lie in a folder: no path, and as long as file systems allow."""
    known = name not in ("", "..") and Path(name).name == name and "\0" not in name
    return known and len(name.encode("utf-8", "surrogatepass")) <= 255


def _read_index(index: Path) -> dict[str, TensorInfo]:
    """All tensors of the files that an index lists, each where the index says."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = set(weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{index} is malformed: expected JSON with a `weight_map` ({type(error).__name__}: {error})."
        ) from error
    held: dict[str, TensorInfo] = {}
    for shard in sorted(names, key=str):
        if not isinstance(shard, str) or not _is_file_name(shard):
            raise ValueError(f"{index} lists {str(shard)[:80]!r}, which is not the name of a file beside it.")
        path = index.with_name(shard)
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing, though {index.name} lists it. Is the download complete?"
            )
        for name, info in read_header(path).items():
            # The same name in a file that the index does not give it to is a left-over of another checkpoint.
            if weight_map.get(name, shard) == shard:
                held[name] = info
    for name, shard in weight_map.items():
        if name not in held:
            raise ValueError(f"{index.with_name(shard)} holds no {name}, though {index.name} says so.")
    return held


def _no_weights(folder: Path, stem: str) -> str:
    pickled = sorted(file.name for file in folder.glob(_pickles(stem)))
    if not pickled:
        return f"{folder} is not a model checkpoint: it has neither {stem}{SUFFIX} nor {stem}{INDEX_SUFFIX}."
    return (
        f"{folder} holds {pickled[0]}, a pickle, which can run code when it is read. Convert it once, where torch is: "
        f"{conversion_line(folder, stem)}"
    )


def conversion_line(folder: Path, stem: str = "model") -> str:
    """The command that makes safetensors of the pickled weights in a folder."""
    # Tensor by tensor, and not through the model's class, which would lose the heads of trlX and TRL. In copies:
    # safetensors takes neither shared memory nor transposed views.
    return (
        f'python -c "import glob, torch; from safetensors.torch import save_file; '
        "save_file({k: v.clone(memory_format=torch.contiguous_format) "
        f"for f in glob.glob('{folder}/{_pickles(stem)}') for k, v in torch.load(f, weights_only=True).items()"
        f"}}, '{folder}/{stem}{SUFFIX}', {{'format': 'pt'}})\""
    )


def _pickles(stem: str) -> str:
    return "pytorch_model*.bin" if stem == "model" else f"{stem}.bin"
