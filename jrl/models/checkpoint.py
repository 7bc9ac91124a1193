# SPDX-License-Identifier: Apache-2.0
"""Hugging Face checkpoints, read and written: safetensors, config.json, and heads in the same file."""

from __future__ import annotations

import copy
import json
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jrl.models.entries_io import (
    check_entries,
    entry_tensors,
    flat_tree,
    initial_shapes,
    load_entries,
    parameter_targets,
    some,
)
from jrl.models.families.base import Entry, Family
from jrl.models.folders import replace_folder
from jrl.models.heads import HEADS, HeadsPlace, found_heads, head_entries, heads_of
from jrl.models.hub import (
    GENERATION_CONFIG,
    Place,
    find_checkpoint,
    named_folder,
    open_tensors,
    read_generation_config,
    read_hf_config,
)
from jrl.models.model import LanguageModel, make_model
from jrl.models.multimodal import TextLayout, TextTensors, copy_processor_files, whole_checkpoint
from jrl.models.safetensors_io import HEADS_FOLDER, Tensors
from jrl.models.safetensors_write import is_model_file, write_tensors
from jrl.models.stacked_experts import StackedExperts
from jrl.typing import Params

MAX_SHARD_BYTES = 5_000_000_000
# trlX's newer files hold the wrapped model under a name of its own, and a copy of the reference's layers.
_WRAPPER, _REFERENCE = "base_model.", "frozen_head."
_EMBEDDING = "embed/embedding"


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in memory.

    Attributes:
      model: What it is, the heads that the files held included.
      params: The whole tree, with `v_head` (and `q_heads`, `target_q_heads`) if the files held them.
      replicated: One line for every dimension that the mesh does not divide.
    """

    model: LanguageModel
    params: dict[str, Any]
    replicated: tuple[str, ...]


def load_checkpoint(
    source: Any,
    *,
    dtype: Any = jnp.float32,
    mesh: Mesh | None = None,
    config_changes: Mapping[str, Any] | None = None,
) -> Loaded:
    """Reads a model folder, one of the Hugging Face hub, or a model object.

    Tensors are read one by one and go straight to their place on the mesh.

    Args:
      source: A folder, "organisation/name" on the hub, or a transformers model object of torch.
      dtype: Of the parameters, whatever the file holds; heads are float32 always.
      mesh: Where to place them; None is the default device.
      config_changes: Replaces entries of config.json.
    Raises:
      FileNotFoundError: If the folder holds no checkpoint, or only a pickled one.
      ValueError: If the architecture is not supported, or the tensors are not those of its config.json, or one of
        them is damaged or not finite.
    """
    place = find_checkpoint(source)
    model = read_model(place, config_changes)
    files = open_tensors(place)
    if model.family.is_multimodal:
        files = TextTensors(files, TextLayout(*model.family.text_prefixes))
    known = {entry.name for entry in model.entries()}
    files = StackedExperts(files, known | {name.removeprefix(model.family.base_prefix) for name in known})
    value_head, num_q_heads = found_heads(name.removeprefix(_WRAPPER) for name in files)
    model = replace(model, value_head=value_head, num_q_heads=num_q_heads)
    model = _with_own_head(model, files)
    entries, prefix = _entries(model), model.family.base_prefix
    names = canonical_names(files, entries, model.family)
    if model.family.kind == "seq2seq" and "shared.weight" in names:
        # transformers 5 ties the head of every T5 that it makes, whatever its config says.
        names.setdefault("lm_head.weight", names["shared.weight"])
    tied = _tied_heads(model)

    def is_ignored(name: str) -> bool:
        return name in tied or any(
            model.family.is_ignored(form, model.config) for form in (name, prefix + name)
        )

    check_entries(files, entries, names, is_ignored=is_ignored, what=f"{model.family.model_type} model")
    shapes = initial_shapes(model.init)
    targets, replicated = parameter_targets(shapes, dtype=dtype, mesh=mesh, float32=HEADS)
    return Loaded(model, load_entries(files, entries, targets, names), tuple(replicated))


def read_model(place: Place, config_changes: Mapping[str, Any] | None = None) -> LanguageModel:
    """Reads the model that a checkpoint's configs describe, without heads: no tensor is looked at.

    Raises:
      ValueError: Naming the place, if jrl has no such model.
    """
    hf_config = read_hf_config(place, config_changes)
    with named_folder(place):
        model = make_model(hf_config)
    kept = place if model.family.is_multimodal else None
    return replace(model, generation_config=read_generation_config(place), place=kept)


def canonical_names(files: Tensors, entries: Sequence[Entry], family: Family) -> dict[str, str]:
    """The table's name of each tensor → its name in the files.

    Args:
      files: May lack the prefix (a bare body), or have trlX's wrapper around it all.
      entries: The table.
      family: Knows the body's prefix, in the table and in files.
    Raises:
      ValueError: If two tensors of the files have one name in the table.
    """
    known = {entry.name for entry in entries}
    wrapped = any(name.startswith(_WRAPPER) for name in files)
    names: dict[str, str] = {}
    for name in files:
        plain = family.table_name(name.removeprefix(_WRAPPER) if wrapped else name)
        if plain.startswith(_REFERENCE):
            continue
        if plain not in known and family.base_prefix + plain in known:
            plain = family.base_prefix + plain
        if plain in names:
            raise ValueError(f"{files.info[name].path}: {names[plain]} and {name} are the same tensor.")
        names[plain] = name
    return names


def save_checkpoint(
    directory: str | os.PathLike[str],
    model: LanguageModel,
    params: Params,
    *,
    tokenizer: Any = None,
    generation_config: Any = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    heads: HeadsPlace = "inside",
) -> None:
    """Writes a folder that transformers (and, for heads inside, trlX and TRL) can open.

    The folder changes in one step: killed at any moment, this leaves the old one or the new one.

    Args:
      directory: Made if missing. The model files of an older checkpoint in it go; its other files stay.
      model: What the parameters belong to.
      params: The whole tree (`merge_params`).
      tokenizer: A transformers tokenizer to store with the model, its chat template included.
      generation_config: A transformers `GenerationConfig` to store with it; None: that of the checkpoint which the
        model was read from, if it had one.
      max_shard_bytes: Larger models are split into several files with an index.
      heads: Where the heads in `params` go, in the layout that they have.
    Raises:
      FileNotFoundError: If the model is part of a multimodal checkpoint that is not there any more.
      ValueError: If `params` is not the whole tree of this model, `directory` holds the working folder, or
        `max_shard_bytes` is no positive whole number.
    """
    value_head, num_q_heads = heads_of(params)
    model = replace(model, value_head=value_head, num_q_heads=num_q_heads)
    of_body, of_heads = model.entries(), _head_entries(model)
    _check_tree(model, of_body + of_heads, params)
    with replace_folder(directory, obsolete=is_model_file) as staging:
        tensors = entry_tensors(of_body + of_heads * (heads == "inside"), params, model.vocab_size)
        tensors = {model.family.file_name(name): tensor for name, tensor in tensors.items()}
        if model.family.is_multimodal:
            tensors = whole_checkpoint(model.place, tensors, TextLayout(*model.family.text_prefixes))
            copy_processor_files(model.place, staging)
        write_tensors(staging, tensors, max_shard_bytes=max_shard_bytes)
        if heads == "apart" and of_heads:
            (staging / HEADS_FOLDER).mkdir()
            tensors = entry_tensors(of_heads, params, model.vocab_size)
            write_tensors(staging / HEADS_FOLDER, tensors, max_shard_bytes=sys.maxsize)
        hf_config = copy.deepcopy(model.hf_config)
        hf_config.architectures = [model.family.architecture]
        # What others load everything in: of several, the one that loses nothing.
        hf_config.dtype = str(jnp.result_type(*{leaf.dtype for leaf in jax.tree.leaves(_body(params))}))
        hf_config.save_pretrained(staging)
        if generation_config is not None:
            generation_config.save_pretrained(staging)
        elif model.generation_config is not None:
            text = json.dumps(model.generation_config, indent=2)
            (staging / GENERATION_CONFIG).write_text(text, encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save_pretrained(staging)


def named_tensors(model: LanguageModel, params: Params) -> dict[str, np.ndarray]:
    """Every tensor of a whole tree on the host, heads included, under the name that a checkpoint gives it."""
    value_head, num_q_heads = heads_of(params)
    model = replace(model, value_head=value_head, num_q_heads=num_q_heads)
    lazy = entry_tensors(_entries(model), params, model.vocab_size)
    return {name: tensor.make() for name, tensor in lazy.items()}


def _body(params: Params) -> dict[str, Any]:
    """The model without its heads."""
    return {name: value for name, value in params.items() if name not in HEADS}


def _entries(model: LanguageModel) -> list[Entry]:
    """Every tensor of this model's checkpoint, the heads' included."""
    return model.entries() + _head_entries(model)


def _head_entries(model: LanguageModel) -> list[Entry]:
    return head_entries(
        model.value_head, model.num_q_heads, width=model.feature_width, vocab_size=model.vocab_size
    )


def _tied_heads(model: LanguageModel) -> set[str]:
    """Names under which the file of a tied model may hold its embedding a second time."""
    untied = model.family.entries(replace(model.config, tie_embeddings=False))
    return {entry.name for entry in untied} - {entry.name for entry in model.entries()}


def _with_own_head(model: LanguageModel, files: Tensors) -> LanguageModel:
    """The model untied, where its config ties the head to the embedding and the files hold another one.

    transformers then reads both as they are. Exports say so: their config ties nothing.
    """
    heads = [name for name in files if name.removeprefix(_WRAPPER) in _tied_heads(model)]
    names = canonical_names(files, model.entries(), model.family)
    embedding = next(entry for entry in model.entries() if entry.paths == (_EMBEDDING,))
    if not heads or embedding.name not in names or _are_equal(files, heads[0], names[embedding.name]):
        return model
    warnings.warn(
        f"{files.source}: the config ties the head to the embedding, but {heads[0]} differs from {embedding.name}: "
        "as in transformers, the head is read as it is and nothing is tied. Does the config belong to these weights?",
        stacklevel=4,
    )
    hf_config = copy.deepcopy(model.hf_config)
    # By this entry T5 also scales its logits, and reads a head of its own in either case.
    hf_config.tie_word_embeddings = model.family.kind == "seq2seq"
    untied: Any = replace(model.config, tie_embeddings=False)
    return replace(model, hf_config=hf_config, config=untied)


def _are_equal(files: Tensors, first: str, second: str) -> bool:
    """True where two tensors hold the same numbers."""
    if files.info[first].shape != files.info[second].shape:
        return False
    return np.array_equal(files.read(first), files.read(second))


def _check_tree(model: LanguageModel, entries: Sequence[Entry], params: Params) -> None:
    wrong = sorted({path for entry in entries for path in entry.paths} ^ set(flat_tree(params)))
    if wrong:
        raise ValueError(
            f"`params` must be the whole tree of a {model.family.model_type} model; missing or unknown: "
            f"{some(wrong)}. Was `merge_params` forgotten?"
        )
