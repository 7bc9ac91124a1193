# SPDX-License-Identifier: Apache-2.0
"""PEFT's folders: `adapter_config.json`, `adapter_model.safetensors`, and the heads in `model.safetensors`.

A PEFT model object of torch is read like such a folder.

Adapters lie in the files as they lie in memory, so that reading and writing are the identity. trlX and TRL keep the
heads of an adapted model in a weight file of its own beside the adapter, under the names it has elsewhere.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl.models.adapters.bind import Adapter
from jrl.models.adapters.config import (
    CAUSAL,
    AdapterConfig,
    PrefixConfig,
    plain_peft_config,
    read_adapter_config,
    to_peft_dict,
)
from jrl.models.adapters.lora import Lora
from jrl.models.adapters.memory_names import name_in_memory
from jrl.models.adapters.targets import matches
from jrl.models.adapters.whole_modules import WholeModule
from jrl.models.entries_io import check_entries, entry_tensors, initial_shapes, load_entries
from jrl.models.families.base import Entry, Shape, table
from jrl.models.folders import replace_folder
from jrl.models.heads import HEADS, found_heads, head_entries, heads_of, init_q_heads, init_value_head
from jrl.models.model_object import ModelObject, as_source
from jrl.models.safetensors_io import TensorFiles, Tensors
from jrl.models.safetensors_write import is_model_file, write_tensors
from jrl.typing import Params, PRNGKey

CONFIG, WEIGHTS, HEAD_FILE = "adapter_config.json", "adapter_model", "model"
_WRAPPED = "base_model.model."
_TEXT_MODEL = "language_model."
_BASE_WEIGHTS = (".base_layer.weight", ".base_layer.bias")
_ROWS, _ROWS_BESIDE = "trainable_tokens_delta", "token_adapter.trainable_tokens_delta"
_LORA_NAMES = {"A": "lora_A.weight", "B": "lora_B.weight", "magnitude": "lora_magnitude_vector"}


class AdapterFolder(NamedTuple):
    """Contents of an `adapter_config.json`, or of a PEFT model object.

    Attributes:
      folder: Where it lies: a folder, or the object.
      config: The adapter.
      base_model: The model that it belongs to: folder, hub id, or the object below the adapter; None where the file
        names none.
    """

    folder: Path | ModelObject
    config: AdapterConfig
    base_model: str | ModelObject | None


def is_adapter_folder(path: Any) -> bool:
    """True for the path of a folder with an adapter, and for a PEFT model object."""
    source = as_source(path)
    if isinstance(source, ModelObject):
        return source.adapter is not None
    return isinstance(source, str | os.PathLike) and (Path(source).expanduser() / CONFIG).is_file()


def read_adapter_folder(path: Any) -> AdapterFolder:
    """The configuration in a folder, or of a PEFT model object.

    Raises:
      ValueError: If the file is no JSON, or asks for what jrl lacks; the message names the file.
    """
    source = as_source(path)
    folder = source if isinstance(source, ModelObject) else Path(source).expanduser()
    where = folder if isinstance(folder, ModelObject) else folder / CONFIG
    try:
        if isinstance(folder, ModelObject):
            values = plain_peft_config(folder.adapter)
        else:
            values = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        config = read_adapter_config(values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if isinstance(config, PrefixConfig):
        # The tensors hold what the MLP made, not the MLP.
        config = replace(config, prefix_projection=False)
    base = folder.base if isinstance(folder, ModelObject) else values.get("base_model_name_or_path")
    return AdapterFolder(folder, config, base)


def adapter_tensors(folder: Path | ModelObject) -> Tensors:
    """The tensors of an adapter under the names of PEFT's files.

    Raises:
      FileNotFoundError: If there is no adapter file, or only a pickled one.
      ValueError: If the file is damaged.
    """
    return folder.adapter_tensors() if isinstance(folder, ModelObject) else TensorFiles(folder, WEIGHTS)


class SavedModules(NamedTuple):
    """Modules of the base model that train and are stored whole, in the adapter's own file.

    Attributes:
      names: As `modules_to_save` of adapter_config.json has them.
      entries: Their tensors, under the names of the model's own checkpoint.
      shapes: Their parameters, as a tree of `jax.ShapeDtypeStruct`, float32.
    """

    names: tuple[str, ...]
    entries: tuple[Entry, ...]
    shapes: Params


def load_adapter(
    folder: Path | ModelObject, adapter: Adapter, saved: SavedModules | None = None
) -> dict[str, Any]:
    """Reads the parameters of an adapter, float32.

    Args:
      folder: With `adapter_model.safetensors`; or a PEFT model object.
      adapter: The folder's configuration, bound to the model.
      saved: What the file holds beside; None: nothing.
    Returns:
      Its entry of the trainable parameters, {"lora": ...}, {"prefix": ...} or {"prompt": ...}, and one for each of the
      parameters that are saved whole.
    Raises:
      FileNotFoundError: If there is no such file, or only a pickled one.
      ValueError: If tensors are missing, unknown, of another shape or not finite; the message names file and tensor.
    """
    files, entries = adapter_tensors(folder), _entries(adapter, saved)
    names = {name: name for name in files}
    _check_rows(files)
    copies = _copies_of_rows(files, adapter)
    # Of an adapted head PEFT stores the base weight too.
    check_entries(
        files,
        entries,
        names,
        is_ignored=lambda name: name.endswith(_BASE_WEIGHTS) or name in copies,
        what=f"{adapter.name} adapter",
    )
    shapes = {} if saved is None else dict(saved.shapes)
    found = load_entries(files, entries, _like(adapter) | shapes)
    whole = {name: found.pop(name) for name in shapes}
    return {adapter.name: found} | whole


def _check_rows(files: Tensors) -> None:
    """Refuses the adapter of an embedding that was resized: PEFT stores the larger table beside the rows."""
    resized = sorted(name for name in files if name.endswith(".token_adapter.base_layer.weight"))
    if resized:
        raise ValueError(
            f"{files.info[resized[0]].path}: {resized[0]} is a whole table of embeddings, which PEFT stores where the "
            "vocabulary of the base model was resized. jrl trains rows of the table that the base model has: save the "
            "resized base model, name it in `base_model_name_or_path`, and leave this tensor away."
        )


def _copies_of_rows(files: Tensors, adapter: Adapter) -> set[str]:
    """Tensors in which TRAINABLE_TOKENS of PEFT stores the rows of a tied table once more, under the head's name."""
    if not isinstance(adapter, Lora) or not adapter.config.trains_tokens_alone:
        return set()
    own = {f"{_WRAPPED}{each.name}.{_ROWS}" for each in adapter.tokens if len(each.ends) > 1}
    others = {name for name in files if name.endswith(f".{_ROWS}")} - own
    first = next(iter(own & set(files)), None)
    return {name for name in others if first and np.array_equal(files.read(name), files.read(first))}


def load_heads(
    folder: Path | ModelObject, *, width: int, vocab_size: int, padded_vocab_size: int
) -> dict[str, Any]:
    """The heads beside an adapter, {"v_head": ...} and perhaps Q heads and their targets, float32; {} without any.

    Args:
      folder: Of the adapter; a PEFT model object has no heads.
      width: Of what the heads read.
      vocab_size: Real entries of the vocabulary.
      padded_vocab_size: Columns of the Q heads in memory.
    Raises:
      FileNotFoundError: If they are there as a pickle only.
      ValueError: If a head does not fit; the message names file and tensor.
    """
    if isinstance(folder, ModelObject):
        return {}
    # trlX and TRL keep them in a pickle, which is refused with the line that converts it, and not passed over.
    if not (folder / f"{HEAD_FILE}.safetensors").is_file() and not any(folder.glob("pytorch_model*.bin")):
        return {}
    files = TensorFiles(folder, HEAD_FILE)
    kind, num_q_heads = found_heads(files)
    entries = head_entries(kind, num_q_heads, width=width, vocab_size=vocab_size)
    names = {name: name for name in files}
    check_entries(files, entries, names, is_ignored=lambda name: False, what="head")

    def init(key: PRNGKey) -> dict[str, Any]:
        head = {} if kind is None else {"v_head": init_value_head(kind, width, key)}
        sizes = width, vocab_size, padded_vocab_size
        return head | (init_q_heads(num_q_heads, *sizes, key) if num_q_heads else {})

    return load_entries(files, entries, initial_shapes(init))


def save_adapter(
    directory: str | os.PathLike[str],
    adapter: Adapter,
    params: Params,
    *,
    base_model: str | None,
    task_type: str = CAUSAL,
    tokenizer: Any = None,
    vocab_size: int | None = None,
    saved: SavedModules | None = None,
) -> None:
    """Writes a folder that PEFT opens, with the heads, if there are any, in `model.safetensors`.

    The folder changes in one step: killed at any moment, this leaves the old one or the new one.

    Args:
      directory: Made if missing. The model files of an older checkpoint in it go; its other files stay.
      adapter: What the parameters belong to.
      params: The trainable parameters: the adapter, and perhaps `v_head`, `q_heads` and `target_q_heads`; a value
        branch is dropped.
      base_model: Folder or hub id of the base model.
      task_type: PEFT's name of what the model does.
      tokenizer: A transformers tokenizer to store with the adapter.
      vocab_size: Real entries of the vocabulary, as many as a Q head has columns in the file.
      saved: Modules whose parameters, in `params` too, are stored whole with the adapter; None: none.
    Raises:
      ValueError: If there are Q heads and no `vocab_size`.
    """
    heads = {name: params[name] for name in HEADS if name in params}
    kind, num_q_heads = heads_of(heads)
    if num_q_heads and vocab_size is None:
        raise ValueError("`vocab_size` must be given to write Q heads, got None.")
    own = params[adapter.name] if isinstance(adapter, Lora) else adapter.saved(params[adapter.name])
    values = to_peft_dict(adapter.config) | _facts(adapter)
    values |= {"base_model_name_or_path": base_model, "task_type": task_type, "inference_mode": True}
    if saved is not None:
        values["modules_to_save"] = list(saved.names)
        own = {**own, **{name: params[name] for name in saved.shapes}}
    with replace_folder(directory, obsolete=is_model_file) as staging:
        _write(staging, _entries(adapter, saved), own, WEIGHTS)
        if kind is not None:
            width = heads["v_head"]["hidden" if kind == "mlp" else "out"]["kernel"].shape[0]
            entries = head_entries(kind, num_q_heads, width=width, vocab_size=vocab_size or 0)
            _write(staging, entries, heads, HEAD_FILE, vocab_size or 0)
        (staging / CONFIG).write_text(json.dumps(values, indent=2, sort_keys=True), encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save_pretrained(staging)


def _write(folder: Path, entries: Sequence[Entry], params: Params, stem: str, vocab_size: int = 0) -> None:
    write_tensors(folder, entry_tensors(entries, params, vocab_size), max_shard_bytes=sys.maxsize, stem=stem)


def _entries(adapter: Adapter, saved: SavedModules | None) -> list[Entry]:
    """Every tensor of an adapter's file. Module names have dots and no slashes: each is one step of a path."""
    whole = () if saved is None else saved.entries
    return [*adapter_entries(adapter), *(replace(entry, name=f"{_WRAPPED}{entry.name}") for entry in whole)]


def adapter_entries(adapter: Adapter) -> list[Entry]:
    """The tensors of an adapter alone, under the names of PEFT's files.

    A path is that of a LoRA's parameters, or of what `VirtualTokens.saved` gives.
    """
    if not isinstance(adapter, Lora):
        return [Entry("prompt_embeddings", ("embedding",), table(), (adapter.count, adapter.saved_width))]
    found = []
    for module in adapter.modules:
        shapes = module.shapes | ({"magnitude": (module.size_out,)} if adapter.config.use_dora else {})
        for leaf, shape in shapes.items():
            name = f"{_WRAPPED}{module.name}.{_LORA_NAMES[leaf]}"
            found.append(Entry(name, (f"{module.name}/{leaf}",), table(), shape))
    rows = _ROWS if adapter.config.trains_tokens_alone else _ROWS_BESIDE
    for each in adapter.tokens:
        found.append(Entry(f"{_WRAPPED}{each.name}.{rows}", (f"{each.name}/rows",), table(), each.shape))
    for whole in adapter.whole:
        found += [_entry_of_whole(whole, entry) for entry in whole.entries]
    return found


def _entry_of_whole(module: WholeModule, entry: Entry) -> Entry:
    """A tensor of the model's table as one of an adapter's."""

    def save(arrays: Sequence[np.ndarray], vocab_size: int) -> np.ndarray:
        return entry.transform.save(
            arrays, entry.shape[0]
        )  # where it counts, that is the vocabulary's real size

    name, paths = name_in_memory(entry.name), tuple(f"{module.name}/{path}" for path in entry.paths)
    return replace(
        entry, name=f"{_WRAPPED}{name}", paths=paths, transform=replace(entry.transform, save=save)
    )


def _like(adapter: Adapter) -> dict[str, Any]:
    shapes = {entry.paths[0]: entry.shape for entry in adapter_entries(adapter)}
    if isinstance(adapter, Lora):
        # Whole modules lie in memory as the model's parameters do, which may be several a tensor.
        for module in adapter.whole:
            shapes |= {f"{module.name}/{path}": shape for path, shape in module.shapes.items()}
    return _structs(shapes)


def _structs(shapes: dict[str, Shape]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, shape in shapes.items():
        *parents, leaf = path.split("/")
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        node[leaf] = jax.ShapeDtypeStruct(shape, jnp.float32)  # type: ignore[no-untyped-call]
    return tree


def _facts(adapter: Adapter) -> dict[str, Any]:
    """Facts of the base model that PEFT's configuration holds."""
    if isinstance(adapter, Lora):
        if adapter.config.trains_tokens_alone:
            return {}
        return {
            "target_modules": _target_modules(adapter),
            "fan_in_fan_out": all(module.inputs_first for module in adapter.modules),
        }
    model, prefix = adapter.model, isinstance(adapter.config, PrefixConfig)
    return {
        "num_layers": model.num_layers,
        "num_attention_heads": model.num_kv_heads,
        "token_dim": model.num_kv_heads * model.head_dim if prefix else adapter.saved_width,
        "num_transformer_submodules": 1,
    }


def _target_modules(lora: Lora) -> str | list[str]:
    """What tells PEFT the adapted modules: a pattern as it is, else their names, which an adapter may have by default.

    Beside the text model of a multimodal one, PEFT would find modules with the same last names, some of a class that it
    refuses: there names are whole.
    """
    targets = lora.config.target_modules
    if isinstance(targets, str):
        return targets
    if targets is None and lora.config.target_parameters is not None:
        return []
    if any(_TEXT_MODEL in module.name for module in lora.modules):
        return sorted(m.name for m in lora.modules if targets is None or matches(targets, m.name))
    return sorted({m.name.rsplit(".", 1)[-1] for m in lora.modules}) if targets is None else list(targets)
