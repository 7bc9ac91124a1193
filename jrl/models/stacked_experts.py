# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that hold all experts of a layer in two tensors, read as the table has them: one a projection and expert.

So Qwen 3.5 is published: `gate_up_proj` is (E, 2F, D), gate first, and `down_proj` is (E, D, F). A save writes the
separate tensors, which transformers reads as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Any, NamedTuple

import numpy as np

from jrl.models.safetensors_io import TensorInfo, Tensors

GATE_UP, DOWN = ".experts.gate_up_proj", ".experts.down_proj"


class _Share(NamedTuple):
    """Part of a stacked tensor: rows `start` to `stop` of one expert."""

    stacked: str
    expert: int
    start: int
    stop: int


class StackedExperts:
    """Tensors of a checkpoint, those of stacked experts one by one.

    Args:
      files: The tensors as stored.
      names: The table's names of all tensors, and those that they have in a file of the bare body.

    Attributes:
      folder: As of the files.
      source: Likewise.
      info: What each tensor is, by name.
    """

    folder: Any
    source: Any

    def __init__(self, files: Tensors, names: Set[str]):
        self.folder, self.source, self._files = files.folder, files.source, files
        self._shares: dict[str, _Share] = {}
        self._last: tuple[Any, np.ndarray] | None = None
        self.info: dict[str, TensorInfo] = {}
        for name, info in files.info.items():
            parts = _parts(name, info, names)
            self._shares |= parts
            if not parts:
                self.info[name] = info
            for part, share in parts.items():
                self.info[part] = info._replace(shape=(share.stop - share.start, info.shape[2]))

    def __iter__(self) -> Iterator[str]:
        """Names of the tensors."""
        return iter(self.info)

    def read(self, name: str, dtype: Any = None, *, finite: bool = True) -> np.ndarray:
        """Reads a tensor; see `TensorFiles.read`.

        The last stacked tensor is kept: experts of one layer are read one after the other.
        """
        if name not in self._shares:
            return self._files.read(name, dtype, finite=finite)
        stacked, expert, start, stop = self._shares[name]
        key = stacked, dtype, finite
        last = self._last
        if last is None or last[0] != key:
            last = self._last = key, self._files.read(stacked, dtype, finite=finite)
        return last[1][expert, start:stop]


def _parts(name: str, info: TensorInfo, names: Set[str]) -> dict[str, _Share]:
    """The table's tensors that a stacked one holds; none where it is none, or the table has it as it is."""
    is_gate_up = name.endswith(GATE_UP)
    if not (is_gate_up or name.endswith(DOWN)) or len(info.shape) != 3:
        return {}
    stem, (count, size, _) = name.rpartition(".")[0], info.shape
    cuts = (
        {"gate_proj": (0, size // 2), "up_proj": (size // 2, size)}
        if is_gate_up
        else {"down_proj": (0, size)}
    )
    found = {
        f"{stem}.{expert}.{part}.weight": _Share(name, expert, *cut)
        for part, cut in cuts.items()
        for expert in range(count)
    }
    return found if names & found.keys() else {}
