# SPDX-License-Identifier: Apache-2.0
"""Descriptions of a run's model, printed before it starts."""

from __future__ import annotations

from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from jrl.data.sources.streams import StreamSet
from jrl.models.classifier import Classifier
from jrl.models.cost import cache_bytes, device_bytes, format_bytes
from jrl.models.model import LanguageModel
from jrl.models.quantize import num_weights
from jrl.typing import Frozen, Params, PolicyFns


def describe_policy(
    lm: LanguageModel,
    policy: PolicyFns,
    params: Params,
    frozen: Frozen,
    *,
    state: Any,
    untrained: Any,
    mesh: Mesh,
    rows: int,
    length: int,
) -> dict[str, str]:
    """Size, mesh and memory, each as one line.

    Args:
      lm: The model.
      policy: The same, as algorithms see it.
      params: What trains.
      frozen: The rest.
      state: All that trains, the optimizer's moments included.
      untrained: All that does not, the reference included.
      mesh: Where they are.
      rows: Rows of one sampling call.
      length: Tokens of one row.
    """
    is_seq2seq = lm.family.kind == "seq2seq"
    cache = cache_bytes(policy, params, frozen, mesh=mesh, rows=rows, length=length, has_context=is_seq2seq)
    return _size_and_mesh(lm.hf_config.model_type, params, frozen, mesh) | {
        "memory": (
            f"a device: trained with optimizer {format_bytes(device_bytes(state))}, frozen and reference "
            f"{format_bytes(device_bytes(untrained))}, cache {format_bytes(cache)} ({rows} x {length} tokens)"
        ),
    }


def describe_denoiser(name: str, params: Params, frozen: Frozen, *, state: Any, mesh: Mesh) -> dict[str, str]:
    """Describes a model that makes images.

    Args:
      name: What it is called.
      params: What trains.
      frozen: The rest: text encoder and decoder of images, and what an adapter leaves alone.
      state: All that trains, the optimizer's moments included.
      mesh: Where they are.
    """
    memory = (
        f"a device: trained with optimizer {format_bytes(device_bytes(state))}, frozen "
        f"{format_bytes(device_bytes(frozen))}"
    )
    return _size_and_mesh(name, params, frozen, mesh) | {"memory": memory}


def describe_scorer(
    model: Classifier, params: Params, frozen: Frozen, *, state: Any, mesh: Mesh
) -> dict[str, str]:
    """Describes a model that writes no text.

    Args:
      model: The model.
      params: What trains.
      frozen: The rest.
      state: All that trains, the optimizer's moments included.
      mesh: Where they are.
    """
    memory = (
        f"a device: trained with optimizer {format_bytes(device_bytes(state))}, frozen "
        f"{format_bytes(device_bytes(frozen))}"
    )
    return _size_and_mesh(model.hf_config.model_type, params, frozen, mesh) | {"memory": memory}


def _size_and_mesh(model_type: str, params: Params, frozen: Frozen, mesh: Mesh) -> dict[str, str]:
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    return {
        "model": f"{model_type}, {count:,} parameters train, {num_weights(frozen):,} are frozen",
        "mesh": ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items()),
    }


WARNING = "warning"
"""Name of the line that says what is probably a mistake."""


def warn_of_batches(batch_size: int, rows: int, what: str, *, ragged: bool = False) -> dict[str, str]:
    """A line where optimizer batches and the rows that there are do not fit each other; {} where they do.

    Args:
      batch_size: `train.batch_size`.
      rows: Rows of one pass.
      what: These rows, in words.
      ragged: Whether a last batch of fewer rows is spoken of, too: it weighs as much as a whole one.
    """
    if batch_size > rows:
        return {
            WARNING: f"`train.batch_size` = {batch_size} is more than {what} ({rows:,}): every optimizer step is on "
            f"{rows:,} rows, and the rest of the batch is empty"
        }
    rest = rows % batch_size
    if ragged and rest:
        return {
            WARNING: f"`train.batch_size` = {batch_size} does not divide {what} ({rows:,}): a pass is "
            f"{rows // batch_size + 1} optimizer steps, the last of them on {rest} rows, which weighs as much as the "
            "others"
        }
    return {}


class Sized(Protocol):
    """Tokenised data, and what did not fit.

    Attributes:
      num_truncated: Entries that were cut.
      num_dropped: Entries that were left out.
    """

    num_truncated: int
    num_dropped: int

    def __len__(self) -> int:
        """Entries that there are."""
        ...


def describe_size(data: Sized) -> str:
    """Such as "1,000, 3 cut, 1 dropped"."""
    if isinstance(data, StreamSet):
        return "a stream of unknown length"
    cut = f", {data.num_truncated} cut" if data.num_truncated else ""
    dropped = f", {data.num_dropped} dropped" if data.num_dropped else ""
    return f"{len(data):,}{cut}{dropped}"
