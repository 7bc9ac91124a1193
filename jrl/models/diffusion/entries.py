# SPDX-License-Identifier: Apache-2.0
"""The rules by which tensors of a diffusers file are parameters here: one line a layer, used both ways.

A module list "a.0.b" is the path "a_0/b"; weights are transposed from (outputs, inputs, height, width).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from jrl.models.families.base import Entry, Shape, Transform, linear, vector


def path_of(name: str) -> str:
    """Path of a module's parameters, "down_blocks_0/resnets_1" for "down_blocks.0.resnets.1"."""
    return re.sub(r"\.(\d+)(?=\.|$)", r"_\1", name).replace(".", "/")


def convolution() -> Transform:
    """Torch's `Conv2d.weight` (O, I, height, width), or a linear map's (O, I), ↔ a kernel (height, width, I, O)."""

    def load(tensor: np.ndarray, shapes: Sequence[Shape]) -> list[np.ndarray]:
        whole = tensor if tensor.ndim == 4 else tensor[:, :, None, None]
        return [whole.transpose(2, 3, 1, 0)]

    return Transform(load, save=lambda arrays, vocab_size: arrays[0].transpose(3, 2, 0, 1))


def linear_map(input_axes: int = 1) -> Transform:
    """Torch's `Linear.weight` (O, I), or a 1 × 1 convolution's (O, I, 1, 1), ↔ a kernel (*inputs, *outputs)."""
    plain = linear(input_axes)

    def load(tensor: np.ndarray, shapes: Sequence[Shape]) -> list[np.ndarray]:
        return plain.load(tensor if tensor.ndim == 2 else tensor.reshape(tensor.shape[:2]), shapes)

    return replace(plain, load=load)


def conv_entries(name: str, size_in: int, size_out: int, kernel_size: int) -> list[Entry]:
    """A convolution and its bias."""
    shape = (size_out, size_in, kernel_size, kernel_size)
    return [_weight(name, "kernel", convolution(), shape), bias_entry(name, size_out)]


def linear_entries(
    name: str, size_in: int, size_out: int, *, bias: bool = True, input_axes: int = 1
) -> list[Entry]:
    """A linear map, with its bias if it has one; `input_axes` leading axes of the kernel are contracted."""
    weight = _weight(name, "kernel", linear_map(input_axes), (size_out, size_in))
    return [weight, bias_entry(name, size_out)] if bias else [weight]


def norm_entries(name: str, width: int) -> list[Entry]:
    """Scale and bias of a norm."""
    return [_weight(name, "scale", vector(), (width,)), bias_entry(name, width)]


def bias_entry(name: str, width: int) -> Entry:
    """The bias of a layer."""
    return Entry(f"{name}.bias", (f"{path_of(name)}/bias",), vector(), (width,))


def as_stored(entries: Sequence[Entry], stored: Mapping[str, Shape]) -> list[Entry]:
    """The table with the shapes of a file that stores linear maps as 1 × 1 convolutions, or the reverse.

    What the parameter is decides how the tensor is read, not what the file made of it.

    Args:
      entries: The table.
      stored: Shapes of the file, by the table's names; what is missing, or otherwise different, is left for
        `check_entries` to complain about.
    """

    def fitted(entry: Entry) -> Entry:
        shape = stored.get(entry.name, entry.shape)
        is_matrix = len(entry.shape) in (2, 4) and len(shape) in (2, 4)
        same = is_matrix and shape[:2] == entry.shape[:2]
        points = math.prod(shape[2:]) == math.prod(entry.shape[2:]) == 1
        return replace(entry, shape=shape) if same and points else entry

    return [fitted(entry) for entry in entries]


def _weight(name: str, leaf: str, transform: Transform, shape: Shape) -> Entry:
    return Entry(f"{name}.weight", (f"{path_of(name)}/{leaf}",), transform, shape)
