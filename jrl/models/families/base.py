# SPDX-License-Identifier: Apache-2.0
"""Definition of a family: its config mapping, and its table of checkpoint tensors ↔ parameters, used both ways."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Transform:
    """An invertible change of layout between one checkpoint tensor and one or more parameters.

    Attributes:
      load: `(tensor, shapes of the parameters) -> parameters`.
      save: `(parameters, vocabulary size) -> tensor`.
      input_axes: Leading axes of each kernel that a linear map contracts; 0: the tensor is no linear map's weight.
      inputs_first: Such a weight lies (in, out) in the file rather than (out, in).
    """

    load: Callable[[np.ndarray, Sequence[Shape]], list[np.ndarray]]
    save: Callable[[Sequence[np.ndarray], int], np.ndarray]
    input_axes: int = 0
    inputs_first: bool = False


def linear(input_axes: int = 1) -> Transform:
    """Torch's `Linear.weight` (out, in), or several one below the other, ↔ kernels (*inputs, *outputs)."""
    return Transform(
        load=lambda tensor, shapes: _split(tensor.T, shapes, input_axes),
        save=lambda arrays, vocab_size: _join(arrays, input_axes).T,
        input_axes=input_axes,
    )


def conv1d(input_axes: int = 1) -> Transform:
    """GPT-2's `Conv1D.weight` (in, out), or several side by side, ↔ kernels (*inputs, *outputs)."""
    return Transform(
        load=lambda tensor, shapes: _split(tensor, shapes, input_axes),
        save=lambda arrays, vocab_size: _join(arrays, input_axes),
        input_axes=input_axes,
        inputs_first=True,
    )


def vector() -> Transform:
    """Biases and norms: (n,), or several end to end, ↔ any shapes with as many elements."""
    return Transform(
        load=lambda tensor, shapes: _split(tensor, shapes, 0),
        save=lambda arrays, vocab_size: _join(arrays, 0)[0],
    )


def linear_by_head() -> Transform:
    """Torch's `Linear.weight` (out, in) with q, k and v of the first key/value head, then of the second, ...

    ↔ (D, N, H), (D, K, H) and (D, K, H): all queries that read a key/value head come before it.
    """
    return Transform(
        load=lambda tensor, shapes: _split_heads(tensor.T, shapes),
        save=lambda arrays, vocab_size: _join_heads(arrays).T,
        input_axes=1,
    )


def linear_by_group(num_groups: int) -> Transform:
    """Torch's `Linear.weight` (out, in), whose rows lie group by group: a share of each kernel, then of the next one.

    Args:
      num_groups: Shares into which the outputs of every kernel (D, *outputs) are cut.
    """

    def load(tensor: np.ndarray, shapes: Sequence[Shape]) -> list[np.ndarray]:
        groups = tensor.T.reshape(tensor.shape[1], num_groups, -1)
        parts, start = [], 0
        for shape in shapes:
            stop = start + math.prod(shape[1:]) // num_groups
            parts.append(groups[:, :, start:stop].reshape(shape))
            start = stop
        return parts

    def save(arrays: Sequence[np.ndarray], vocab_size: int) -> np.ndarray:
        size_in = arrays[0].shape[0]
        groups = [array.reshape(size_in, num_groups, -1) for array in arrays]
        return np.concatenate(groups, axis=2).reshape(size_in, -1).T

    return Transform(load, save, input_axes=1)


def channels() -> Transform:
    """Torch's `Conv1d.weight` (C, 1, W) of channels that each stand alone ↔ (*channels, W), one below the other."""

    def load(tensor: np.ndarray, shapes: Sequence[Shape]) -> list[np.ndarray]:
        parts, start = [], 0
        for shape in shapes:
            stop = start + math.prod(shape[:-1])
            parts.append(tensor[start:stop].reshape(shape))
            start = stop
        return parts

    return Transform(
        load,
        save=lambda arrays, vocab_size: np.concatenate([a.reshape(-1, 1, a.shape[-1]) for a in arrays]),
    )


def turned() -> Transform:
    """A matrix that is no linear map's weight ↔ its transpose."""
    return Transform(load=lambda tensor, shapes: [tensor.T], save=lambda arrays, vocab_size: arrays[0].T)


def vector_by_head() -> Transform:
    """The bias that belongs to `linear_by_head` ↔ (N, H), (K, H) and (K, H)."""
    return Transform(
        load=lambda tensor, shapes: _split_heads(tensor, shapes),
        save=lambda arrays, vocab_size: _join_heads(arrays),
    )


def _split_heads(tensor: np.ndarray, shapes: Sequence[Shape]) -> list[np.ndarray]:
    """(..., K · (N/K + 1 + 1) · H) cut into parts of (..., N, H) and (..., K, H)."""
    num_groups, head_dim = shapes[-1][-2:]
    counts = [shape[-2] // num_groups for shape in shapes]
    groups = tensor.reshape(*tensor.shape[:-1], num_groups, sum(counts), head_dim)
    stops = [sum(counts[: part + 1]) for part in range(len(counts))]
    return [
        groups[..., stop - count : stop, :].reshape(shape)
        for stop, count, shape in zip(stops, counts, shapes, strict=True)
    ]


def _join_heads(arrays: Sequence[np.ndarray]) -> np.ndarray:
    num_groups, head_dim = arrays[-1].shape[-2:]
    outer = arrays[0].shape[:-2]
    groups = [array.reshape(*outer, num_groups, -1, head_dim) for array in arrays]
    return np.concatenate(groups, axis=-2).reshape(*outer, -1)


def table() -> Transform:
    """A table of vectors, unchanged."""
    return Transform(load=lambda tensor, shapes: [tensor], save=lambda arrays, vocab_size: arrays[0])


def interleaved() -> Transform:
    """(..., 2n), whose even and odd columns are two parameters of (..., n)."""
    return Transform(
        load=lambda tensor, shapes: [tensor[..., 0::2], tensor[..., 1::2]],
        save=lambda arrays, vocab_size: np.stack(arrays, axis=-1).reshape(*arrays[0].shape[:-1], -1),
    )


def halves() -> Transform:
    """(..., 2n), whose first and second half are two parameters of (..., n)."""
    return Transform(
        load=lambda tensor, shapes: [tensor[..., : shapes[0][-1]], tensor[..., shapes[0][-1] :]],
        save=lambda arrays, vocab_size: np.concatenate(arrays, axis=-1),
    )


def stacked_linear() -> Transform:
    """(E, out, in): weights of E linear maps, or for each several one below the other, ↔ kernels (E, in, outputs)."""

    def turned(tensor: np.ndarray) -> np.ndarray:
        # The numbers of the rows of one map are as they are.
        return tensor if tensor.ndim == 1 else tensor.swapaxes(-1, -2)

    return Transform(
        load=lambda tensor, shapes: _split(turned(tensor), shapes, len(shapes[0]) - 1),
        save=lambda arrays, vocab_size: turned(np.concatenate(arrays, axis=-1)),
    )


def vocabulary(*, transposed: bool) -> Transform:
    """(V, D) ↔ the padded embedding (Vpad, D), or the padded head (D, Vpad) where `transposed`."""

    def load(tensor: np.ndarray, shapes: Sequence[Shape]) -> list[np.ndarray]:
        missing = shapes[0][1 if transposed else 0] - tensor.shape[0]
        padded = np.pad(tensor, ((0, missing), (0, 0))) if missing else tensor
        return [padded.T if transposed else padded]

    def save(arrays: Sequence[np.ndarray], vocab_size: int) -> np.ndarray:
        return (arrays[0].T if transposed else arrays[0])[:vocab_size]

    return Transform(load, save, input_axes=1 if transposed else 0)


def vocabulary_vector() -> Transform:
    """(V,) ↔ the head's padded bias (Vpad,)."""
    return Transform(
        load=lambda tensor, shapes: [np.pad(tensor, (0, shapes[0][0] - tensor.shape[0]))],
        save=lambda arrays, vocab_size: arrays[0][:vocab_size],
    )


def _split(matrix: np.ndarray, shapes: Sequence[Shape], input_axes: int) -> list[np.ndarray]:
    """The parameters that lie side by side in the last axis. Nothing but methods: the arrays may be traced by JAX."""
    parts, start = [], 0
    for shape in shapes:
        stop = start + math.prod(shape[input_axes:])
        parts.append(matrix[..., start:stop].reshape(shape))
        start = stop
    return parts


def _join(arrays: Sequence[np.ndarray], input_axes: int) -> np.ndarray:
    """A matrix (inputs, outputs) of kernels side by side."""
    return np.concatenate([a.reshape(math.prod(a.shape[:input_axes]), -1) for a in arrays], axis=-1)


@dataclass(frozen=True)
class Entry:
    """A tensor of a checkpoint.

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
    """A family of models, a `model_type` of Hugging Face.

    Attributes:
      model_type: As in config.json.
      architecture: Class that a saved config.json names, so that others open the folder as a causal model.
      read_config: Maps a transformers config to the one that models of its kind are built from; raises ValueError on
        what this family cannot do here.
      entries: Every tensor of a checkpoint, given that config.
      base_prefix: Prefix that checkpoints of the bare body lack.
      file_prefix: What files have in its place; None: the same.
      other_names: Patterns of names that some files have for tensors of the table, and what replaces them in reading.
      ignored: Patterns of tensors that old checkpoints hold and nobody needs (masks, inverse frequencies).
      ignored_in: The same for models of a config.
      has_prediction_layer: Checkpoints hold one layer behind the last, `model.layers.<num_layers>`: that of multi-token
        prediction, which serves speculative decoding alone.
      kind: What the architecture is for.
      classifier: Class of its sequence classifier, where the name does not follow from `architecture`.
      is_multimodal: It is the text model of a larger one, whose config holds its own as `text_config`.
      text_prefixes: Of the body and head of a multimodal one's text model, in memory of torch and in an adapter's
        file.
    """

    model_type: str
    architecture: str
    read_config: Callable[[Any], Any]
    entries: Callable[[Any], list[Entry]]
    base_prefix: str
    file_prefix: str | None = None
    other_names: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    ignored_in: Callable[[Any], tuple[str, ...]] = lambda config: ()
    has_prediction_layer: bool = False
    kind: Literal["causal", "seq2seq", "encoder"] = "causal"
    classifier: str | None = None
    is_multimodal: bool = False
    text_prefixes: tuple[str, str] = ("model.language_model.", "lm_head.")

    def text_config(self, hf: Any) -> Any:
        """The part of a transformers config that describes the text model: of most families, all of it."""
        return hf.text_config if self.is_multimodal else hf

    def table_name(self, name: str) -> str:
        """The table's name of a tensor of a file."""
        for pattern, own in self.other_names:
            name = re.sub(pattern, own, name)
        if self.file_prefix is None or not name.startswith(self.file_prefix):
            return name
        return self.base_prefix + name.removeprefix(self.file_prefix)

    def file_name(self, name: str) -> str:
        """The name in files of a tensor of the table."""
        if self.file_prefix is None or not name.startswith(self.base_prefix):
            return name
        return self.file_prefix + name.removeprefix(self.base_prefix)

    def is_ignored(self, name: str, config: Any) -> bool:
        """True where a tensor of this name holds nothing that a model of this config learns."""
        if self.has_prediction_layer and name.startswith(f"model.layers.{config.num_layers}."):
            return True
        return any(re.search(pattern, name) for pattern in (*self.ignored, *self.ignored_in(config)))


ACTIVATIONS: Mapping[str, str] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
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


def check_direction(hf: Any) -> None:
    """Refuses a decoder that reads in both directions: transformers heeds an entry that no config class declares.

    Args:
      hf: A transformers config of a decoder, or of an encoder-decoder.
    Raises:
      ValueError: If `is_causal` is there and not true.
    """
    found = hf.to_dict().get("is_causal", True)
    require(hf.model_type, "is_causal", True, bool(found), "a language model reads backwards only")


def require(model_type: str, option: str, expected: Any, got: Any, because: str) -> None:
    """Raises ValueError unless an option of a config has the one value that is supported.

    Args:
      model_type: Of the config.
      option: Its name in config.json.
      expected: The supported value.
      got: What the config says.
      because: Completes the sentence after the colon: "`option` must be expected, got ...: because."
    """
    if got != expected:
        raise ValueError(f"{model_type}: `{option}` must be {expected!r}, got {got!r}: {because}.")
