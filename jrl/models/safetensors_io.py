# SPDX-License-Identifier: Apache-2.0
"""The tensor files of a Hugging Face folder, read: one `model.safetensors`, or several with an index.

Files are read, never mapped (mapped pages would count as this process's memory), and a tensor is cast and checked
piece by piece while it is read: reading one costs its size in the dtype asked for, whatever the file holds. The
format (https://huggingface.co/docs/safetensors) is eight bytes of length, a JSON header of that length, and the
tensors' bytes end to end.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np

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
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
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
LENGTH_BYTES = 8
# The limit of the format's own library: a damaged length must not make us allocate whatever it says.
_MAX_HEADER_BYTES = 100_000_000
PIECE_BYTES = 1 << 24
LFS_POINTER = "version https://git-lfs"
"""How a file begins that git-lfs left in the place of another one."""


class TensorInfo(NamedTuple):
    """Where a tensor lies.

    Attributes:
      path: The file; of a model object, that.
      dtype: Of the stored elements.
      shape: As stored.
      start: Offset of its first byte in the file.
    """

    path: Any
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int


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

    def read(self, name: str, dtype: Any = None) -> np.ndarray:
        """Reads a tensor, all of whose values are finite."""


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

    def read(self, name: str, dtype: Any = None) -> np.ndarray:
        """Reads a tensor, all of whose values are finite.

        Args:
          name: Of the tensor.
          dtype: Of the result; None: the file's.
        Raises:
          ValueError: If the file ends early, or a value is NaN or infinite (in the file, or in `dtype`).
        """
        info = self.info[name]
        tensor = np.empty(info.shape, info.dtype if dtype is None else dtype)
        flat = tensor.reshape(-1)
        step = max(1, PIECE_BYTES // info.dtype.itemsize)
        buffer = None if tensor.dtype == info.dtype else np.empty(min(step, flat.size), info.dtype)
        with info.path.open("rb", buffering=0) as file:
            file.seek(info.start)
            for start in range(0, flat.size, step):
                piece = flat[start : start + step]
                raw = piece if buffer is None else buffer[: piece.size]
                _fill(file, raw, info.path, name)
                if buffer is not None:
                    with np.errstate(all="ignore"):
                        piece[...] = raw
                check_finite(piece, info.path, name)
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
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        begin = LENGTH_BYTES + length
        if length.to_bytes(LENGTH_BYTES, "little") == LFS_POINTER.encode()[:LENGTH_BYTES]:
            raise ValueError(
                f"{path} is a git-lfs pointer, not the weights: run `git lfs pull` in its repository."
            )
        if begin > size or length > _MAX_HEADER_BYTES:
            raise _unreadable(path, f"it has {size} bytes and announces a header of {length}")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            info = {name: _tensor_info(path, entry, begin) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _unreadable(path, f"its header is malformed ({type(error).__name__}: {error})") from error
    # Every byte belongs to exactly one tensor: otherwise the file holds what nobody declared, or is cut off.
    position = begin
    for name, tensor in sorted(info.items(), key=lambda item: (item[1].start, _num_bytes(item[1]))):
        if tensor.start != position:
            raise _unreadable(path, f"{name} begins at byte {tensor.start} instead of {position}")
        position += _num_bytes(tensor)
        if position > size:
            raise _unreadable(path, f"{name} ends at byte {position} of {size}")
    if position != size:
        raise _unreadable(path, f"{size - position} bytes behind its last tensor belong to none")
    return info


def read_metadata(path: Path) -> dict[str, str]:
    """Reads a file's own metadata, after `read_header` found the header to be sound; {} where there is none."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        return dict(json.loads(file.read(length)).get("__metadata__") or {})


def _tensor_info(path: Path, entry: Mapping[str, Any], begin: int) -> TensorInfo:
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"unknown dtype {entry['dtype']!r}")
    shape = tuple(entry["shape"])
    start, stop = entry["data_offsets"]
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, start, stop)):
        raise ValueError(f"shape {shape} or offsets {start}, {stop} are no sizes")
    info = TensorInfo(path, DTYPES[entry["dtype"]], shape, begin + start)
    if stop - start != _num_bytes(info):
        raise ValueError(f"{info.dtype}{list(shape)} has {_num_bytes(info)} bytes, not {stop - start}")
    return info


def _num_bytes(info: TensorInfo) -> int:
    return math.prod(info.shape) * info.dtype.itemsize


def _unreadable(path: Path, why: str) -> ValueError:
    return ValueError(f"{path} is not a readable safetensors file: {why}. Is it cut off?")


def _fill(file: io.FileIO, array: np.ndarray, path: Path, name: str) -> None:
    """Reads exactly the array's bytes."""
    view = array.view(np.uint8).data
    while view:
        count = file.readinto(view)
        if not count:
            raise _unreadable(path, f"it ends within {name}")
        view = view[count:]


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
