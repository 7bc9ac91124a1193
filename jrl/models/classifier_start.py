# SPDX-License-Identifier: Apache-2.0
"""Initial reward models: from a classifier's checkpoint, or a language model's with a fresh head."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from jrl.mesh import place, tree_shardings
from jrl.models.checkpoint import canonical_names
from jrl.models.classifier import HEADS, Classifier, present_name
from jrl.models.entries_io import check_entries, initial_shapes, load_entries, parameter_targets
from jrl.models.families.base import Entry
from jrl.models.hub import (
    CONFIG_FILES,
    find_checkpoint,
    is_checkpoint,
    named_folder,
    open_tensors,
    read_hf_config,
)
from jrl.models.safetensors_io import Tensors
from jrl.typing import PRNGKey

ARGUMENT = "`model.model_path`"


@dataclass(frozen=True)
class Start:
    """A classifier in memory.

    Attributes:
      model: What it is.
      params: The whole tree.
      fresh: Parts of the head that no file held.
      replicated: One line for every dimension that the mesh does not divide.
    """

    model: Classifier
    params: dict[str, Any]
    fresh: tuple[str, ...]
    replicated: tuple[str, ...]


def describe_start(path: Any, changes: Mapping[str, Any] | None = None, *, num_labels: int = 1) -> Classifier:
    """The classifier that training starts from, by its config alone: no weight is read, and none downloaded.

    Args:
      path: A folder, a name on the hub, a transformers model object of torch, or a transformers config object.
      changes: Replaces entries of config.json. `num_labels` among them is how one asks for a fresh head.
      num_labels: Scores of a text.
    Raises:
      ValueError: If the architecture is not supported, `changes` asks for another number of labels, or for changes of
        a config object.
    """
    others = dict(changes or {})
    wanted = others.pop("num_labels", num_labels)
    if wanted != num_labels:
        raise ValueError(
            f"`model.model_extra_configs.num_labels` must be {num_labels}, got {wanted!r}: a reward model gives one "
            "score a text."
        )
    if is_checkpoint(path):
        place = find_checkpoint(path, files=CONFIG_FILES, argument=ARGUMENT)
        with named_folder(place):
            return _with_labels(read_hf_config(place, others), num_labels)
    if others:
        raise ValueError(
            "`model.model_extra_configs` changes the config of a checkpoint, and `model.model_path` is a config "
            f"object: set {sorted(others)} on that object."
        )
    return _with_labels(path, num_labels)


def load_start(
    path: Any,
    key: PRNGKey,
    *,
    changes: Mapping[str, Any] | None = None,
    num_labels: int = 1,
    dtype: Any = jnp.float32,
    mesh: Mesh,
) -> Start:
    """The classifier that training starts from.

    A classification head in the files is used; without one (a language model, a bare body) the head is fresh, and what
    else the files hold beside the body is passed over.

    Args:
      path: As in `describe_start`.
      key: Of whatever is fresh: the head, or with a config object everything.
      changes: As in `describe_start`.
      num_labels: Scores of a text.
      dtype: Of the parameters, whatever the file holds; the head is float32 always.
      mesh: Where to place them.
    Raises:
      FileNotFoundError: If the folder holds no checkpoint, or only a pickled one.
      ValueError: If the architecture is not supported, the checkpoint classifies into several labels, or its tensors
        are not those of its config.
    """
    model = describe_start(path, changes, num_labels=num_labels)
    if not is_checkpoint(path):
        params = model.init(key)
        places, replicated = tree_shardings(mesh, params)
        heads = tuple(name for name in params if name in HEADS)
        return Start(model, place(params, places), heads, tuple(replicated))
    files = open_tensors(find_checkpoint(path, argument=ARGUMENT))
    found = canonical_names(files, model.entries(), model.family)
    names = {present_name(name): file for name, file in found.items()}
    fresh = _fresh_heads(model, files, names, may_replace="num_labels" in (changes or {}))
    kept = [entry for entry in model.entries() if _top(entry) not in fresh]

    def is_ignored(name: str) -> bool:
        return model.family.is_ignored(name, model.config) or (
            bool(fresh) and not name.startswith(model.family.base_prefix)
        )

    what = f"{model.family.model_type} classifier"
    check_entries(files, kept, names, is_ignored=is_ignored, what=what)
    shapes = initial_shapes(model.init)
    targets, replicated = parameter_targets(shapes, dtype=dtype, mesh=mesh, float32=HEADS)
    found = load_entries(
        files, kept, {name: value for name, value in targets.items() if name not in fresh}, names
    )
    if fresh:
        drawn = model.init_heads(key)
        made = {name: drawn[name] for name in fresh}
        found |= place(made, tree_shardings(mesh, made)[0])
    return Start(model, found, fresh, tuple(replicated))


def _with_labels(hf_config: Any, num_labels: int) -> Classifier:
    """The classifier of a config, whatever number of labels that has: transformers gives a language model two."""
    hf_config = copy.deepcopy(hf_config)
    if hf_config.num_labels != num_labels:
        hf_config.num_labels = num_labels
    return Classifier.from_config(hf_config)


def _fresh_heads(
    model: Classifier, files: Tensors, names: Mapping[str, str], *, may_replace: bool
) -> tuple[str, ...]:
    """Top-level parameters of the head that the files do not hold.

    Raises:
      ValueError: If the files hold a head for another number of labels, and the caller did not ask to replace it.
    """
    fresh = []
    for entry in model.head_entries():
        shape = files.info[names[entry.name]].shape if entry.name in names else None
        if shape is not None and shape[0] != entry.shape[0] and not may_replace:
            raise ValueError(
                f"{files.folder}: {entry.name} scores {shape[0]} labels, and a reward model has {entry.shape[0]}: name "
                "a language model, or set `model.model_extra_configs: {num_labels: 1}`, which puts a fresh head in its "
                "place."
            )
        if (shape is None or shape[0] != entry.shape[0]) and _top(entry) not in fresh:
            fresh.append(_top(entry))
    return tuple(fresh)


def _top(entry: Entry) -> str:
    return entry.paths[0].split("/")[0]
