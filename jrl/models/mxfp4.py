# SPDX-License-Identifier: Apache-2.0
"""MXFP4 tensors of a checkpoint, read as bfloat16: two numbers of four bits a byte, and a power of two for each 32.

Format: OCP Microscaling Formats (MX) Specification 1.0, section 5. A tensor W is stored as `W_blocks`, whose last axis
holds 16 bytes, low halves first, and `W_scales`, exponents with bias 127. What is stored is the transposed matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from jrl.models.safetensors_io import TensorInfo, Tensors, check_finite

BLOCKS, SCALES = "_blocks", "_scales"
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_POSITIVE, *(-value for value in _POSITIVE)], np.float32)
_BIAS, _NAN = 127, 255


class Mxfp4Tensors:
    """Tensors of a checkpoint, some of which are packed: these go by the name that both of their parts share.

    Args:
      files: The tensors as stored.

    Attributes:
      folder: As of the files.
      source: Likewise.
      info: What each tensor is once it is expanded, by name.

    Raises:
      ValueError: If the two parts of a tensor do not fit together.
    """

    folder: Any
    source: Any

    def __init__(self, files: Tensors):
        self.folder, self.source, self._files = files.folder, files.source, files
        self._packed = set(packed_names(files))
        parts = {name + end for name in self._packed for end in (BLOCKS, SCALES)}
        self.info = {name: info for name, info in files.info.items() if name not in parts}
        for name in self._packed:
            blocks, scales = files.info[name + BLOCKS], files.info[name + SCALES]
            if blocks.dtype != np.uint8 or scales.dtype != np.uint8 or blocks.shape[:-1] != scales.shape:
                raise ValueError(
                    f"{blocks.path}: {name}{BLOCKS} and {name}{SCALES} must be bytes, one scale a block; got "
                    f"{blocks.dtype} {blocks.shape} and {scales.dtype} {scales.shape}."
                )
            *outer, rows, groups, size = blocks.shape
            shape = (*outer, groups * size * 2, rows)
            self.info[name] = TensorInfo(blocks.path, np.dtype(ml_dtypes.bfloat16), shape)

    def __iter__(self) -> Iterator[str]:
        """Names of the tensors."""
        return iter(self.info)

    def read(self, name: str, dtype: Any = None, *, finite: bool = True) -> np.ndarray:
        """Reads a tensor; see `TensorFiles.read`."""
        if name not in self._packed:
            return self._files.read(name, dtype, finite=finite)
        info = self.info[name]
        blocks, scales = self._files.read(name + BLOCKS), self._files.read(name + SCALES)
        found = expand(blocks, scales, info.dtype if dtype is None else dtype)
        for index in np.ndindex(found.shape[:-2]) if finite else ():
            check_finite(found[index], info.path, name)
        return found


def packed_names(files: Tensors) -> list[str]:
    """Names of the packed tensors among these."""
    stems = (name.removesuffix(BLOCKS) for name in files if name.endswith(BLOCKS))
    return [stem for stem in stems if stem + SCALES in files.info]


def expand(blocks: np.ndarray, scales: np.ndarray, dtype: Any) -> np.ndarray:
    """The numbers that packed ones stand for, exact in bfloat16.

    Args:
      blocks: (..., N, G, 16) bytes.
      scales: (..., N, G) exponents; 255 is NaN.
      dtype: Of the result.
    Returns:
      (..., 32 · G, N): one matrix a leading index, transposed as torch multiplies with it.
    Example:
      >>> two = expand(np.full((1, 1, 16), 0x21, np.uint8), np.full((1, 1), 128, np.uint8), np.float32)
      >>> two.shape, two[:2, 0].tolist()
      ((32, 1), [1.0, 2.0])
    """
    *outer, rows, groups, size = blocks.shape
    found = np.empty((*outer, groups * size * 2, rows), dtype)
    # One matrix at a time: expanded in float32 all experts of a layer would take several times their room.
    for index in np.ndindex(*outer):
        halves = np.stack([blocks[index] & 15, blocks[index] >> 4], axis=-1)
        numbers = _VALUES[halves].reshape(rows, groups, size * 2)
        powers = scales[index].astype(np.int32)[..., None] - _BIAS
        with np.errstate(over="ignore"):
            matrix = np.where(powers == _NAN - _BIAS, np.float32(np.nan), np.ldexp(numbers, powers))
            found[index] = matrix.reshape(rows, -1).T
    return found
