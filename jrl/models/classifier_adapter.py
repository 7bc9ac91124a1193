# SPDX-License-Identifier: Apache-2.0
"""PEFT's folders of an adapted classifier: the LoRA matrices, and beside them the head, whole (`modules_to_save`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jrl.mesh import make_mesh, path_name, place, tree_shardings
from jrl.models.adapters.config import SEQ_CLS, AdapterConfig, LoraConfig
from jrl.models.adapters.lora import Lora
from jrl.models.adapters.peft_format import (
    SavedModules,
    adapter_tensors,
    load_adapter,
    read_adapter_folder,
    save_adapter,
)
from jrl.models.adapters.targets import bind_lora, check_maps_alone
from jrl.models.classifier import HEADS, Classifier
from jrl.models.classifier_start import describe_start, load_start
from jrl.models.entries_io import initial_shapes, some
from jrl.models.model_object import ModelObject
from jrl.typing import Params


def bind_classifier(model: Classifier, adapter: AdapterConfig | None) -> Lora | None:
    """An adapter of a classifier's layers; None where there is none. The head is no part of it: it trains whole.

    Raises:
      ValueError: If it is no LoRA, is meant for another kind of model, saves other modules than the head, or does not
        fit the model.
    """
    if adapter is None:
        return None
    kind = model.family.model_type
    if not isinstance(adapter, LoraConfig):
        raise ValueError(
            f"peft_config: `peft_type` must be LORA for a {kind} classifier, got {type(adapter).__name__}: virtual "
            "tokens are for models that write."
        )
    if adapter.task_type not in (None, SEQ_CLS):
        raise ValueError(
            f"peft_config: `task_type` must be {SEQ_CLS} for a {kind} classifier, got {adapter.task_type!r}. Is it an "
            "adapter of a language model? Merge that one into its base first."
        )
    check_maps_alone(adapter, f"{kind} classifier", modules=True)
    # PEFT itself adds both usual names.
    others = set(adapter.modules_to_save or ()) - {*model.head_modules, "score", "classifier"}
    if others:
        raise ValueError(
            f"peft_config: `modules_to_save` must name nothing but the head, {', '.join(model.head_modules)}, which is "
            f"saved without being named; got {', '.join(sorted(others))}."
        )
    leaves = jax.tree_util.tree_leaves_with_path(initial_shapes(model.init))
    shapes = {path_name(path): leaf.shape for path, leaf in leaves}
    heads = {entry.name for entry in model.head_entries()}
    return bind_lora(adapter, [entry for entry in model.entries() if entry.name not in heads], shapes, kind)


def save_classifier_adapter(
    directory: str | os.PathLike[str],
    model: Classifier,
    adapter: Lora,
    params: Params,
    *,
    base_model: str | None,
    tokenizer: Any = None,
) -> None:
    """Writes a folder that PEFT opens on the base model with as many labels.

    Args:
      directory: Made if missing. The model files of an older checkpoint in it go; its other files stay.
      model: The classifier.
      adapter: What the parameters belong to.
      params: The trainable parameters: the adapter and the head.
      base_model: Folder or hub id of the base model.
      tokenizer: A transformers tokenizer to store beside.
    """
    save_adapter(
        directory,
        adapter,
        params,
        base_model=base_model,
        task_type=SEQ_CLS,
        tokenizer=tokenizer,
        saved=_saved(model),
    )


def load_classifier_adapter(folder: Path | ModelObject, model: Classifier, adapter: Lora) -> dict[str, Any]:
    """Reads an adapter and the head beside it, float32: {"lora": ..., "score": ...}.

    Raises:
      FileNotFoundError: If there is no adapter file, or only a pickled one.
      ValueError: If tensors are missing, the head's among them, unknown, of another shape or not finite.
    """
    head = {f"base_model.model.{entry.name}" for entry in model.head_entries()}
    missing = sorted(head - set(adapter_tensors(folder)))
    if missing:
        raise ValueError(
            f"{folder}: the adapter was saved without the head it was trained with: {some(missing)} is missing. Was "
            f"`modules_to_save` {list(model.head_modules)} left out?"
        )
    return load_adapter(folder, adapter, _saved(model))


def load_adapted_classifier(
    path: Any, *, dtype: Any = jnp.float32, mesh: Mesh | None = None
) -> tuple[Classifier, dict[str, Any]]:
    """A folder's adapter on its base model, as one classifier: the adapter is merged into the weights.

    Args:
      path: The adapter's folder, or a PEFT model object.
      dtype: Of the parameters; the head is float32 always.
      mesh: Where to place them; None is the first device.
    Raises:
      ValueError: If the adapter names no base model, was made for another kind of model, or does not fit it.
    """
    found = read_adapter_folder(path)
    if found.base_model is None:
        raise ValueError(
            f"{found.folder} holds an adapter, but its adapter_config.json has no `base_model_name_or_path`: name the "
            "folder or hub id of the model it belongs to there."
        )
    mesh = make_mesh(1, 1, 1, devices=jax.local_devices()[:1]) if mesh is None else mesh
    num_labels = count_labels(found.folder, describe_start(found.base_model))
    # float32, so that the sum of weight and update is rounded once.
    start = load_start(
        found.base_model,
        jax.random.key(0),
        changes={"num_labels": num_labels},
        num_labels=num_labels,
        mesh=mesh,
    )
    adapter = bind_classifier(start.model, found.config)
    assert adapter is not None
    loaded = load_classifier_adapter(found.folder, start.model, adapter)
    heads = {name: value for name, value in loaded.items() if name in HEADS}
    whole = jax.jit(adapter.merge)(start.params, loaded[adapter.name])
    params = {name: jax.tree.map(lambda x: x.astype(dtype), value) for name, value in whole.items()} | heads
    return start.model, place(params, tree_shardings(mesh, params)[0])


def count_labels(folder: Path | ModelObject, model: Classifier) -> int:
    """Labels of the head beside an adapter; those of the model where there is none, which is an error elsewhere."""
    files, name = adapter_tensors(folder), f"base_model.model.{model.head_entries()[-1].name}"
    return files.info[name].shape[0] if name in set(files) else len(model.labels)


def _saved(model: Classifier) -> SavedModules:
    shapes = initial_shapes(model.init_heads)
    return SavedModules(model.head_modules, tuple(model.head_entries()), shapes)
