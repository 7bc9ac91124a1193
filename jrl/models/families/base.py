# SPDX-License-Identifier: Apache-2.0
"""What a family is: its config mapping, and its table of checkpoint tensors ↔ parameters, used both ways."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jrl.models.config import TransformerConfig

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Transform:
    """An invertible change of layout between one checkpoint tensor and one or more parameters.

    Attributes:
      load: `(tensor, shapes of the parameters) -> parameters`.
      save: `(parameters, vocabulary size) -> tensor`.
    """

    load: Callable[[np.ndarray, Sequence[Shape]], list[np.ndarray]]
    save: Callable[[Sequence[np.ndarray], int], np.ndarray]


def linear(input_axes: int = 1) -> Transform:
    """Torch's `Linear.weight` (out, in) ↔ a kernel (*inputs, *outputs) with so many input axes."""
    return Transform(
        load=lambda tensor, shapes: [tensor.T.reshape(shapes[0])],
        save=lambda arrays, vocab_size: _matrix(arrays[0], input_axes).T,
    )


def conv1d(input_axes: int = 1) -> Transform:
    """GPT-2's `Conv1D.weight` (in, out), or several side by side, ↔ kernels (*inputs, *outputs)."""
    return Transform(
        load=lambda tensor, shapes: [
            part.reshape(shape) for part, shape in zip(_split(tensor, len(shapes)), shapes, strict=True)
        ],
        save=lambda arrays, vocab_size: np.concatenate([_matrix(a, input_axes) for a in arrays], axis=-1),
    )


def vector() -> Transform:
    """Biases and norms: (n,), or several end to end, ↔ any shapes with as many elements."""
    return Transform(
        load=lambda tensor, shapes: [
            part.reshape(shape) for part, shape in zip(_split(tensor, len(shapes)), shapes, strict=True)
        ],
        save=lambda arrays, vocab_size: np.concatenate([a.reshape(-1) for a in arrays]),
    )


def table() -> Transform:
    """A table of vectors, unchanged."""
    return Transform(load=lambda tensor, shapes: [tensor], save=lambda arrays, vocab_size: arrays[0])


def vocabulary(*, transposed: bool) -> Transform:
    """(V, D) ↔ the padded embedding (Vpad, D), or the padded head (D, Vpad) where `transposed`."""

    def load(tensor: np.ndarray, shapes: Sequence[Shape]) -> list[np.ndarray]:
        rows = shapes[0][1] if transposed else shapes[0][0]
        padded = np.pad(tensor, ((0, rows - tensor.shape[0]), (0, 0)))
        return [padded.T if transposed else padded]

    def save(arrays: Sequence[np.ndarray], vocab_size: int) -> np.ndarray:
        return (arrays[0].T if transposed else arrays[0])[:vocab_size]

    return Transform(load, save)


def _split(tensor: np.ndarray, parts: int) -> list[np.ndarray]:
    return np.split(tensor, parts, axis=-1)


def _matrix(kernel: np.ndarray, input_axes: int) -> np.ndarray:
    return kernel.reshape(int(np.prod(kernel.shape[:input_axes])), -1)


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint.

    Attributes:
      name: In the file.
      paths: Of the parameters it holds, "layers_0/attn/q/kernel".
      transform: Between the two layouts.
      shape: In the file.
      index: Position along the parameter's first axis that this tensor fills; None: the whole parameter.
    """

    name: str
    paths: tuple[str, ...]
    transform: Transform
    shape: Shape
    index: int | None = None


@dataclass(frozen=True)
class Family:
    """One `model_type` of Hugging Face.

    Attributes:
      model_type: As in config.json.
      architecture: Class that a saved config.json names, so that others open the folder as a causal model.
      read_config: Maps a transformers config; raises ValueError on what this family cannot do here.
      entries: Every tensor of a checkpoint, given the config.
      base_prefix: Prefix that checkpoints of the bare body lack.
      ignored: Patterns of tensors that old checkpoints hold and nobody needs (masks, inverse frequencies).
      kind: What the architecture is for.
    """

    model_type: str
    architecture: str
    read_config: Callable[[Any], TransformerConfig]
    entries: Callable[[TransformerConfig], list[Entry]]
    base_prefix: str
    ignored: tuple[str, ...] = ()
    kind: Literal["causal", "seq2seq", "encoder"] = "causal"

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor of this name carries nothing that is learned."""
        return any(re.search(pattern, name) for pattern in self.ignored)


ACTIVATIONS: Mapping[str, str] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


def read_activation(model_type: str, name: str) -> Any:
    """jrl's name of a transformers activation.

    Raises:
      ValueError: If it has none.
    """
    if name not in ACTIVATIONS:
        raise ValueError(
            f"{model_type}: the activation must be one of {', '.join(ACTIVATIONS)}; got {name!r}."
        )
    return ACTIVATIONS[name]
