# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of multimodal models, of which jrl computes and trains the text model alone.

All other tensors (vision, projector) stay in the checkpoint that was read. A save copies them from there, bit for bit
and under their own names, so that the folder opens as the same class again. So do the processors' files.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jrl.models.hub import Place, open_tensors
from jrl.models.safetensors_io import TensorInfo, Tensors
from jrl.models.safetensors_write import LazyTensor

PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)


class TextLayout(NamedTuple):
    """Names of the text model in the files of a checkpoint.

    Attributes:
      body: Prefix of all but the head.
      head: Prefix of the head.
    """

    body: str
    head: str

    def table_name(self, name: str, table: TextLayout) -> str | None:
        """The table's name of a tensor in the files; None: it is no part of the text model."""
        for own, known in ((self.head, table.head), (self.body, table.body)):
            if name.startswith(own):
                return known + name.removeprefix(own)
        return name if name.startswith(("v_head.", "ilql_heads.")) else None

    def file_name(self, name: str, table: TextLayout) -> str:
        """The reverse for a tensor of the text model."""
        for own, known in ((self.head, table.head), (self.body, table.body)):
            if name.startswith(known):
                return own + name.removeprefix(known)
        return name


LAYOUTS = (
    TextLayout("language_model.model.", "language_model.lm_head."),
    TextLayout("model.language_model.", "lm_head."),
    TextLayout("model.", "lm_head."),
)
"""Each begins with more than the next: the first one that fits is it. They are those of transformers' versions."""


def find_layout(names: Iterable[str]) -> TextLayout:
    """The layout of a checkpoint with tensors of these names."""
    names = list(names)
    fitting = (layout for layout in LAYOUTS if any(name.startswith(layout.body) for name in names))
    return next(fitting, LAYOUTS[-1])


class TextTensors:
    """The text model's tensors of a multimodal checkpoint, under the names that the table has for them.

    Args:
      files: All tensors of the checkpoint.
      table: The layout of the table's names.

    Attributes:
      folder: As of the files.
      source: Likewise.
      info: What each tensor is, by its name in the table.
    """

    folder: Any
    source: Any

    def __init__(self, files: Tensors, table: TextLayout):
        layout = find_layout(files)
        self.folder, self.source, self._files = files.folder, files.source, files
        tables = {layout.table_name(name, table): name for name in files}
        self._names = {name: own for name, own in tables.items() if name is not None}
        self.info: dict[str, TensorInfo] = {name: files.info[own] for name, own in self._names.items()}

    def __iter__(self) -> Iterator[str]:
        """Names of the tensors."""
        return iter(self.info)

    def read(self, name: str, dtype: Any = None, *, finite: bool = True) -> np.ndarray:
        """Reads a tensor; see `TensorFiles.read`."""
        return self._files.read(self._names[name], dtype, finite=finite)


def check_origin(place: Place | None) -> Place:
    """The checkpoint that a multimodal model was read from.

    Raises:
      ValueError: If there is none: the model was made from a config.
    """
    if place is None:
        raise ValueError(
            "a multimodal model can be saved only if it was read from a checkpoint: its vision tensors are copied "
            "from there, and a config has none. Use the config's `text_config` for a text model alone."
        )
    return place


def whole_checkpoint(
    place: Place | None, text: Mapping[str, LazyTensor], table: TextLayout
) -> dict[str, LazyTensor]:
    """The tensors of the text model under the names of the checkpoint it is part of, with all others of that.

    Args:
      place: Where that checkpoint is.
      text: Of the text model, by their names in the table.
      table: The layout of these names.
    Raises:
      FileNotFoundError: If the checkpoint is not there any more.
      ValueError: As `check_origin`.
    """
    files = open_tensors(check_origin(place))
    layout = find_layout(files)
    found = {layout.file_name(name, table): tensor for name, tensor in text.items()}
    for name, info in files.info.items():
        if layout.table_name(name, table) is None:
            # Ranges of a vision tower may be unbounded.
            found[name] = LazyTensor(info.dtype, info.shape, partial(files.read, name, finite=False))
    return found


def copy_processor_files(place: Place | None, folder: Path) -> None:
    """Copies the files of image and video processors, where the checkpoint has some."""
    if not isinstance(place, Path):
        return
    for name in PROCESSOR_FILES:
        if (place / name).is_file():
            shutil.copyfile(place / name, folder / name)
